// The call of an action that nobody may lose an interruption in; the interpreter calls it with its lock held. The few
// functions of Python that are used are declared here, so that its headers need not be there.

extern "C" {

extern void* PyExc_Exception;
extern char _Py_NoneStruct;
void* PyObject_CallNoArgs(void* callable);
void* PyObject_Type(void* object);
void Py_DecRef(void* object);  // also of null
int PyErr_ExceptionMatches(void* type);
void PyErr_Fetch(void** type, void** value, void** trace);
void PyErr_NormalizeException(void** type, void** value, void** trace);
void PyErr_Restore(void* type, void* value, void* trace);  // takes all three over
void PyErr_WriteUnraisable(void* where);
int PyException_SetTraceback(void* value, void* trace);
int Py_AddPendingCall(int (*function)(void*), void* argument);
}

namespace {

constexpr int kTries = 8;  // each was interrupted but the last

// The exception that is raised now, without the frames that it went through, which hold what is to be let go.
void* caught() {
  void *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyException_SetTraceback(value, &_Py_NoneStruct);
  Py_DecRef(type);
  Py_DecRef(trace);
  return value;
}

// Raise it here, and take it over.
int hand_over(void* value) {
  PyErr_Restore(PyObject_Type(value), value, nullptr);
  return -1;
}

}  // namespace

// Take an action, if it is still to be taken, and call it until it was not interrupted. What interrupted it, such as a
// Ctrl-C, is raised again in the main thread as soon as that is back in code that can hear it: a callback like this one
// has nobody to raise it to.
extern "C" void lowtide_end(void* take, void*) {
  void* interruption = nullptr;
  void* action = PyObject_CallNoArgs(take);
  if (action == nullptr) PyErr_WriteUnraisable(take);
  for (int i = 0; i < kTries && action != nullptr && action != &_Py_NoneStruct; ++i) {
    void* answer = PyObject_CallNoArgs(action);
    if (answer != nullptr) {
      Py_DecRef(answer);
      break;
    }
    if (PyErr_ExceptionMatches(PyExc_Exception)) {
      PyErr_WriteUnraisable(action);
      break;
    }
    Py_DecRef(interruption);
    interruption = caught();
  }
  Py_DecRef(action);
  if (interruption != nullptr && Py_AddPendingCall(hand_over, interruption) != 0) {
    hand_over(interruption);
    PyErr_WriteUnraisable(take);
  }
}
