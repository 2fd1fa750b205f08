// The quick comparison of entries by identity, with the interpreter's own look-up; called with its lock held.
// The few functions of Python that are used are declared here, so that its headers need not be there.
#include <cstdint>

extern "C" {

void* PyDict_GetItemWithError(void* mapping, void* key);  // borrowed; null: nothing there
std::intptr_t PyDict_Size(void* mapping);
int PyDict_Next(void* mapping, std::intptr_t* position, void** key, void** value);
void PyErr_Clear();
void* PyObject_Type(void* object);  // to be given back
void Py_DecRef(void* object);

// Whether all entries are what they were, all mappings as large, those whose order counts in their order, and all objects
// of their classes. A value of null stands for nothing. `order` are the keys of all mappings whose order counts, in a
// row, and `ordered` for each mapping how many of them are its own.
std::int64_t lowtide_same(void** holders, void** keys, void** values, std::int64_t entries, void** mappings,
                          const std::int64_t* sizes, std::int64_t count, void** order, const std::int64_t* ordered,
                          void** objects, void** kinds, std::int64_t classed) {
  for (std::int64_t i = 0; i < entries; ++i) {
    void* now = PyDict_GetItemWithError(holders[i], keys[i]);
    if (now != values[i]) {
      if (now == nullptr) PyErr_Clear();
      return 0;
    }
  }
  for (std::int64_t i = 0; i < count; ++i) {
    if (PyDict_Size(mappings[i]) != sizes[i]) return 0;
    std::intptr_t position = 0;
    void* key = nullptr;
    for (std::int64_t j = 0; j < ordered[i]; ++j)
      if (!PyDict_Next(mappings[i], &position, &key, nullptr) || key != *order++) return 0;
  }
  for (std::int64_t i = 0; i < classed; ++i) {
    void* kind = PyObject_Type(objects[i]);
    Py_DecRef(kind);
    if (kind != kinds[i]) return 0;
  }
  return 1;
}
}
