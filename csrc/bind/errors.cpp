#include "bind/errors.hpp"

#include <nanobind/stl/string.h>

#include "base/error.hpp"

namespace nb = nanobind;

namespace lily::bind {
namespace {

// Owned for the life of the process: set once when the package is imported.
PyObject* classes = nullptr;

nb::object error_class(const char* name) {
  PyObject* found = classes ? PyDict_GetItemString(classes, name) : nullptr;
  return nb::borrow(found ? found : PyExc_RuntimeError);
}

template <class... Named>
void raise(const char* name, const char* message, Named&&... named) {
  nb::object type = error_class(name);
  bool plain = type.ptr() == PyExc_RuntimeError;
  nb::object value = plain ? type(message) : type(message, std::forward<Named>(named)...);
  PyErr_SetObject(type.ptr(), value.ptr());
}

void translate(const std::exception_ptr& p, void*) {
  try {
    std::rethrow_exception(p);
  } catch (const CheckpointError& e) {
    raise("CheckpointError", e.what(), nb::arg("found") = e.found, nb::arg("expected") = e.expected, nb::arg("tensor") = e.tensor);
  } catch (const GPUError& e) {
    raise("GPUError", e.what(), nb::arg("stage") = e.stage, nb::arg("log") = e.log);
  } catch (const DeviceError& e) {
    raise("DeviceError", e.what());
  } catch (const OutOfMemoryError& e) {
    raise("OutOfMemoryError", e.what(), nb::arg("needed") = e.needed, nb::arg("available") = e.available, nb::arg("hint") = e.hint);
  } catch (const ContextOverflowError& e) {
    raise("ContextOverflowError", e.what(), nb::arg("tokens") = e.tokens, nb::arg("limit") = e.limit);
  } catch (const SamplingError& e) {
    raise("SamplingError", e.what());
  } catch (const CancelledError& e) {
    raise("CancelledError", e.what());
  } catch (const InvalidArgument& e) {
    PyErr_SetString(PyExc_ValueError, e.what());
  } catch (const Error& e) {
    raise("LilyError", e.what());
  }
}

}  // namespace

void define_errors(nb::module_& m) {
  m.def(
      "set_exceptions",
      [](nb::dict names) {
        Py_XDECREF(classes);
        classes = names.release().ptr();
      },
      nb::arg("classes"), "Registers the Python exception classes, by name, that errors of the engine are raised as.");
  nb::register_exception_translator(translate);
}

}  // namespace lily::bind
