// The quick comparison of entries by identity, with the interpreter's own look-up; called with its lock held.
// The few functions of Python that are used are declared here, so that its headers need not be there.
#include <cstdint>

extern "C" {

void* PyDict_GetItemWithError(void* mapping, void* key);  // borrowed; null: nothing there
std::intptr_t PyDict_Size(void* mapping);
void PyErr_Clear();
void* PyObject_Type(void* object);  // to be given back
void Py_DecRef(void* object);

// Whether all entries are what they were, all mappings as large, and all objects of their classes. A value of null
// stands for nothing.
std::int64_t lowtide_same(void** holders, void** keys, void** values, std::int64_t entries, void** mappings,
                          const std::int64_t* sizes, std::int64_t count, void** objects, void** kinds,
                          std::int64_t classed) {
  for (std::int64_t i = 0; i < entries; ++i) {
    void* now = PyDict_GetItemWithError(holders[i], keys[i]);
    if (now != values[i]) {
      if (now == nullptr) PyErr_Clear();
      return 0;
    }
  }
  for (std::int64_t i = 0; i < count; ++i)
    if (PyDict_Size(mappings[i]) != sizes[i]) return 0;
  for (std::int64_t i = 0; i < classed; ++i) {
    void* kind = PyObject_Type(objects[i]);
    Py_DecRef(kind);
    if (kind != kinds[i]) return 0;
  }
  return 1;
}
}
