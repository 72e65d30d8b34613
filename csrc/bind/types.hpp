// The objects behind the Python classes.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <memory>

#include "engine/decoder.hpp"

namespace lily::bind {

struct NativeModel {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Engine> get() const;
};

struct NativeSession {
  std::shared_ptr<Session> session;
  // By value: the caller keeps the session alive while another thread closes this object.
  std::shared_ptr<Session> get() const {
    if (!session) throw InvalidArgument("the session is closed");
    return session;
  }
};

struct NativeDecoder {
  explicit NativeDecoder(std::unique_ptr<Decoder> d) : decoder(std::move(d)) {}
  std::unique_ptr<Decoder> decoder;
  // Draining waits for the device: not while other Python threads stand still.
  ~NativeDecoder() {
    nanobind::gil_scoped_release release;
    decoder.reset();
  }
};

// Runs engine work without the GIL and turns an interrupt back into the Python exception that the signal handler raised.
struct Signals {
  std::unique_ptr<nanobind::python_error> error;
  Interrupt poll();
  template <class Fn>
  void run(Fn&& fn) {
    try {
      nanobind::gil_scoped_release release;
      fn();
    } catch (const Interrupted&) {
      if (error) throw std::move(*error);
      throw;
    }
  }
};

template <class T, class From>
nanobind::object copy_array(const From* from, size_t n) {
  static_assert(sizeof(T) == sizeof(From));
  T* data = new T[n ? n : 1];
  if (n) std::memcpy(data, from, n * sizeof(T));
  nanobind::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nanobind::ndarray<nanobind::numpy, T>(data, {n}, owner).cast();
}

}  // namespace lily::bind
