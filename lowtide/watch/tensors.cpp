// Whether tensors are as they were, and those of an optimizer's state where they were; called with the interpreter's lock
// held. What is known of each tensor is a row of numbers; a row that differs is for Python to judge.
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <cstdint>
#include <exception>

using Int = std::int64_t;

extern "C" {

void* PyDict_GetItemWithError(void* mapping, void* key);  // borrowed; null: nothing there
std::intptr_t PyDict_Size(void* mapping);
int PyDict_Next(void* mapping, std::intptr_t* place, void** key, void** value);  // borrowed
int PyList_SetItem(void* list, std::intptr_t place, void* item);  // takes the item over
void PyErr_Clear();
void Py_IncRef(void* object);
}

namespace {

// Give the numbers of a tensor to `take`, one after another, until it says no. `object` is the tensor in Python, of so
// many words, one of which is the address of the tensor here; the first one counts references.
template <class Take> bool look(const void* object, Int words, Int address, bool gradient, Take take) {
  const Int* fields = static_cast<const Int*>(object);
  for (Int k = 1; k < words; ++k)
    if (!take(fields[k])) return false;
  const auto& tensor = *reinterpret_cast<const c10::TensorImpl*>(fields[address]);
  if (!take(static_cast<Int>(tensor.dtype().toScalarType())) || !take(static_cast<Int>(tensor.key_set().raw_repr())) ||
      !take(tensor.requires_grad()) || !take(reinterpret_cast<Int>(tensor.data())) || !take(tensor.dim()))
    return false;
  // A gradient is a pointer to its tensor, or to the one that stands for none; c10 does not know more of at::Tensor.
  if (gradient && !take(*reinterpret_cast<const c10::TensorImpl* const*>(&tensor.grad()) !=
                        c10::UndefinedTensorImpl::singleton()))
    return false;
  for (const auto& numbers : {tensor.sizes(), tensor.strides()})
    for (const Int number : numbers)
      if (!take(number)) return false;
  return true;
}

// Rows of addresses and numbers that Python keeps.
struct Tensors {
  const void* const* objects;
  const std::uint8_t* gradients;  // whether it counts that there is one
  Int count, words, address;
  Int* numbers;  // what is known of them

  template <class Take> bool all(Take take) const noexcept {
    try {
      for (Int k = 0; k < count; ++k)
        if (!look(objects[k], words, address, gradients[k] != 0, take)) return false;
      return true;
    } catch (const std::exception&) {  // a tensor without memory, or with sizes of its own kind
      return false;
    }
  }
};

struct State {
  Int count;  // of parameters, each with a mapping of its own
  void *const *owners, *const *inside;
  const Int* starts;  // of each parameter's tensors, and the end of the last one's
  void *const *keys, *const *tensors;
  const Int* places;  // in the list
};

}  // namespace

extern "C" {

// Write the rows of all tensors. Returns how many numbers they have, or -1 where they can't be told or have no room.
Int lowtide_tensors_note(const Tensors* tensors, Int room) {
  Int written = 0;
  const bool told = tensors->all([&](Int number) {
    if (written == room) return false;
    tensors->numbers[written++] = number;
    return true;
  });
  return told ? written : -1;
}

// Whether the rows of all tensors are these.
Int lowtide_tensors_same(const Tensors* tensors) {
  const Int* numbers = tensors->numbers;
  return tensors->all([&](Int number) { return number == *numbers++; });
}

// Whether a mapping has these items, by identity and in this order, and each of these mappings inside has these tensors
// at these keys; each is put into the list at its place. Nothing but the keys and the list needs to be alive.
Int lowtide_state_take(const State* state, void* mapping, void* list) {
  if (PyDict_Size(mapping) != state->count) return 0;
  std::intptr_t place = 0;
  void *owner = nullptr, *entries = nullptr;
  for (Int k = 0; k < state->count; ++k) {
    if (!PyDict_Next(mapping, &place, &owner, &entries) || owner != state->owners[k] || entries != state->inside[k])
      return 0;
    for (Int i = state->starts[k]; i < state->starts[k + 1]; ++i) {
      void* now = PyDict_GetItemWithError(entries, state->keys[i]);
      if (now == nullptr) PyErr_Clear();
      if (now == nullptr || now != state->tensors[i]) return 0;
      Py_IncRef(now);
      PyList_SetItem(list, state->places[i], now);
    }
  }
  return 1;
}
}
