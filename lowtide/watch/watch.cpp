// The quick comparison of entries by identity, with the interpreter's own look-up; called with its lock held.
// The few functions of Python that are used are declared here, so that its headers need not be there.
#include <cstdint>
#include <initializer_list>

using Int = std::int64_t;

extern "C" {

extern void *PyExc_AttributeError, *PyExc_ValueError, *PyExc_IndexError;
void* PyDict_GetItemWithError(void* mapping, void* key);  // borrowed; null: nothing there
std::intptr_t PyDict_Size(void* mapping);
int PyDict_Next(void* mapping, std::intptr_t* position, void** key, void** value);
std::intptr_t PyList_Size(void* list);
void* PyList_GetItem(void* list, std::intptr_t place);  // borrowed
void* PyCell_Get(void* cell);                           // to be given back; null: it is empty
void* PyObject_GetAttr(void* object, void* name);       // to be given back; null: an error was raised
void* PyErr_Occurred();
int PyErr_ExceptionMatches(void* kind);
void PyErr_Clear();
void* PyObject_Type(void* object);  // to be given back
void Py_DecRef(void* object);
}

namespace {

// What is expected, as rows of addresses that Python keeps alive. A value of null stands for nothing.
struct Expected {
  Int entries;  // of mappings: values at keys
  void **holders, **keys, **values;
  Int places;  // attributes of other objects; where the name is null, the content of a cell
  void **owners, **names, **contents;
  Int mappings;  // their sizes and, where the order counts, so many of their keys; all keys are in one row
  void** mapped;
  const Int *sizes, *ordered;
  void** order;
  Int lists;  // their sizes; all items are in one row
  void** listed;
  const Int* lengths;
  void** items;
  Int objects;  // of these classes
  void **classed, **kinds;
};

bool same_entries(const Expected& expected) {
  for (Int i = 0; i < expected.entries; ++i) {
    void* now = PyDict_GetItemWithError(expected.holders[i], expected.keys[i]);
    if (now != expected.values[i]) {
      if (now == nullptr) PyErr_Clear();
      return false;
    }
  }
  return true;
}

// An error that does not say that nothing is there stays raised.
bool same_places(const Expected& expected) {
  for (Int i = 0; i < expected.places; ++i) {
    void* name = expected.names[i];
    void* now = name == nullptr ? PyCell_Get(expected.owners[i]) : PyObject_GetAttr(expected.owners[i], name);
    if (now != nullptr) {
      Py_DecRef(now);
    } else if (PyErr_Occurred() != nullptr) {
      for (void* kind : {PyExc_AttributeError, PyExc_ValueError, PyExc_IndexError})
        if (PyErr_ExceptionMatches(kind)) {
          PyErr_Clear();
          break;
        }
      if (PyErr_Occurred() != nullptr) return false;
    }
    if (now != expected.contents[i]) return false;
  }
  return true;
}

bool same_mappings(const Expected& expected) {
  void** order = expected.order;
  for (Int i = 0; i < expected.mappings; ++i) {
    if (PyDict_Size(expected.mapped[i]) != expected.sizes[i]) return false;
    std::intptr_t position = 0;
    void* key = nullptr;
    for (Int j = 0; j < expected.ordered[i]; ++j)
      if (!PyDict_Next(expected.mapped[i], &position, &key, nullptr) || key != *order++) return false;
  }
  return true;
}

bool same_lists(const Expected& expected) {
  void** items = expected.items;
  for (Int i = 0; i < expected.lists; ++i) {
    if (PyList_Size(expected.listed[i]) != expected.lengths[i]) return false;
    for (Int j = 0; j < expected.lengths[i]; ++j)
      if (PyList_GetItem(expected.listed[i], j) != *items++) return false;
  }
  return true;
}

bool same_classes(const Expected& expected) {
  for (Int i = 0; i < expected.objects; ++i) {
    void* kind = PyObject_Type(expected.classed[i]);
    Py_DecRef(kind);
    if (kind != expected.kinds[i]) return false;
  }
  return true;
}

}  // namespace

// Whether everything is what it was.
extern "C" Int lowtide_same(const Expected* expected) {
  return same_entries(*expected) && same_mappings(*expected) && same_lists(*expected) && same_classes(*expected) &&
         same_places(*expected);
}
