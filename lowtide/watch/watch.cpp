// The quick comparison of entries by identity, with the interpreter's own look-up; called with its lock held.
// The few functions of Python that are used are declared here, so that its headers need not be there.
#include <cstdint>

extern "C" {

void* PyDict_GetItemWithError(void* mapping, void* key);  // borrowed; null: nothing there
std::intptr_t PyDict_Size(void* mapping);
void PyErr_Clear();

// The number of the first entry that is not what it was, `entries` plus that of the first mapping whose size is not,
// or -1. A value of null stands for nothing.
std::int64_t lowtide_same(void** holders, void** keys, void** values, std::int64_t entries, void** mappings,
                          const std::int64_t* sizes, std::int64_t count) {
  for (std::int64_t i = 0; i < entries; ++i) {
    void* now = PyDict_GetItemWithError(holders[i], keys[i]);
    if (now != values[i]) {
      if (now == nullptr) PyErr_Clear();
      return i;
    }
  }
  for (std::int64_t i = 0; i < count; ++i)
    if (PyDict_Size(mappings[i]) != sizes[i]) return entries + i;
  return -1;
}
}
