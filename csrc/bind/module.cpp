// The extension module: conversion, docstrings and the release of the GIL; no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/convert.hpp"
#include "bind/errors.hpp"
#include "bind/limits.hpp"
#include "bind/selftest.hpp"
#include "bind/session_io.hpp"
#include "bind/testing.hpp"
#include "bind/types.hpp"
#include "device/metal/metal_device.hpp"
#include "device/metal/sources.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily::bind {

Interrupt Signals::poll() {
  return [this] {
    nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    error = std::make_unique<nb::python_error>();
    return true;
  };
}

std::shared_ptr<Engine> NativeModel::get() const {
  if (!engine) throw InvalidArgument("the model is closed");
  return engine;
}

namespace {

using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls a Python progress function on the thread that waits; whatever it raises ends the work.
Session::Progress progress_calls(const nb::object& fn, const char* stage) {
  if (fn.is_none()) return nullptr;
  return [&fn, stage](uint64_t done, uint64_t total) {
    nb::gil_scoped_acquire gil;
    fn(stage, done, total);
  };
}

nb::dict memory_dict(const NativeModel& m) {
  MemoryReport r = m.get()->memory();
  nb::dict d;
  d["weights"] = r.weights;
  d["kv"] = r.kv;
  d["states"] = r.states;
  d["workspace"] = r.workspace;
  d["requests"] = r.requests;
  d["snapshots"] = r.snapshots;
  d["total"] = r.weights + r.kv + r.states + r.snapshots + r.workspace + r.requests;
  d["limit"] = r.limit;
  d["kv_bytes_per_token"] = r.kv_bytes_per_token;
  d["state_bytes"] = r.state_bytes;
  return d;
}

void define_model(nb::module_& m) {
  nb::class_<NativeModel>(m, "Model", "A checkpoint loaded on a device.")
      .def(
          "__init__",
          [](NativeModel* self, nb::dict spec, nb::list weights, const std::string& device, std::optional<uint32_t> max_context, std::optional<uint64_t> memory_limit, nb::object progress) {
            ModelSpec s = spec_from(spec);
            if (max_context) s.max_context = *max_context;
            auto sources = weights_from(weights);
            Engine::Progress calls = [&](const char* stage, uint64_t done, uint64_t total) {
              nb::gil_scoped_acquire gil;
              if (PyErr_CheckSignals() != 0) throw nb::python_error();
              if (!progress.is_none()) progress(stage, done, total);
            };
            std::shared_ptr<Engine> engine;
            {
              nb::gil_scoped_release release;
              engine = Engine::open(s, sources, device, memory_limit.value_or(0), calls);
            }
            new (self) NativeModel{engine};
          },
          "spec"_a, "weights"_a, "device"_a = "auto", "max_context"_a = nb::none(), "memory_limit"_a = nb::none(), "progress"_a = nb::none())
      .def(
          "session",
          [](NativeModel& m) {
            auto engine = m.get();
            nb::gil_scoped_release release;  // its buffers may have to wait for room
            return NativeSession{std::make_shared<Session>(engine)};
          },
          "A new, empty session.")
      .def("memory", &memory_dict, "Bytes in use by kind, and the limit.")
      .def(
          "held_bytes",
          [](NativeModel&, const std::vector<NativeSession*>& sessions) {
            std::vector<std::shared_ptr<Session>> held;
            for (NativeSession* s : sessions)
              if (s->session) held.push_back(s->session);
            return held_bytes(held);
          },
          "sessions"_a, "Bytes that these sessions hold together; what they share is counted once.")
      .def(
          "trim",
          [](NativeModel& m) {
            std::shared_ptr<Engine> engine = m.get();
            nb::gil_scoped_release release;
            engine->trim();
          },
          "Gives back memory that no session holds.")
      .def_prop_ro("fused", [](NativeModel& m) { return m.get()->fused(); }, "Whether the plan is the fused one.")
      .def("plan", [](NativeModel& m) { return plan_dict(m.get()->model(), m.get()->policy(), m.get()->chunk()); }, "The decode step and the prefill chunk as recorded.")
      .def(
          "close",
          [](NativeModel& m) {
            std::shared_ptr<Engine> engine = std::move(m.engine);  // with the GIL, so that no get() sees it half gone
            m.engine.reset();
            nb::gil_scoped_release release;
            engine.reset();
          },
          "Lets go of the engine; its memory is returned when the last session has gone too.")
      .def("set_chunk", [](NativeModel& m, uint32_t rows) { m.get()->set_chunk(rows); }, "rows"_a)
      .def_prop_ro("device", [](NativeModel& m) { return device_dict(m.get()->device()->info()); })
      .def_prop_ro("chunk", [](NativeModel& m) { return m.get()->chunk(); })
      .def_prop_ro("max_context", [](NativeModel& m) { return m.get()->max_context(); })
      .def_prop_ro("in_flight", [](NativeModel& m) { return m.get()->device()->in_flight(); });
}

void define_session(nb::module_& m) {
  nb::class_<NativeSession>(m, "Session", "Tokens and the state after them.")
      .def(
          "append",
          [](NativeSession& s, Ids ids, nb::object progress, const std::vector<uint32_t>& marks, bool keep_end) {
            Signals signals;
            auto calls = progress_calls(progress, "prefill");
            signals.run([&, session = s.get()] { session->append(ids.data(), ids.size(), calls, signals.poll(), marks, keep_end); });
          },
          "ids"_a, "progress"_a = nb::none(), "marks"_a = std::vector<uint32_t>(), "keep_end"_a = true)
      .def(
          "rewind",
          [](NativeSession& s, uint32_t n, nb::object progress) {
            Signals signals;
            auto calls = progress_calls(progress, "rewind");
            Rewind r{};
            signals.run([&, session = s.get()] { r = session->rewind(n, calls, signals.poll()); });
            return nb::make_tuple(r.kept, r.reread);
          },
          "n"_a, "progress"_a = nb::none())
      .def_prop_ro("snapshots",
                   [](NativeSession& s) {
                     return s.get()->view().snapshots;
                   })
      .def(
          "append_rows",
          [](NativeSession& s, Ids ids, const std::string& mode, nb::object progress) {
            bool score = mode == "score";
            if (!score && mode != "logits") throw InvalidArgument("mode is '" + mode + "', expected logits or score");
            size_t width = score ? 1 : s.get()->engine()->model().spec.vocab_size;
            auto out = std::make_unique<float[]>(ids.size() * width);
            Signals signals;
            auto calls = progress_calls(progress, "prefill");
            signals.run([&, session = s.get()] { session->append_rows(ids.data(), ids.size(), score ? Session::Rows::score : Session::Rows::logits, out.get(), calls, signals.poll()); });
            float* data = out.release();
            nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
            if (score) return nb::ndarray<nb::numpy, float>(data, {ids.size()}, owner).cast();
            return nb::ndarray<nb::numpy, float>(data, {ids.size(), width}, owner).cast();
          },
          "ids"_a, "mode"_a, "progress"_a = nb::none())
      .def("logits",
           [](NativeSession& s) {
             size_t V = s.get()->engine()->model().spec.vocab_size;
             auto out = std::make_unique<float[]>(V);
             Signals signals;
             signals.run([&, session = s.get()] { session->logits(out.get(), signals.poll()); });
             float* data = out.release();
             nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
             return nb::ndarray<nb::numpy, float>(data, {V}, owner).cast();
           })
      .def("fork",
           [](NativeSession& s) {
             auto session = s.get();
             nb::gil_scoped_release release;
             return NativeSession{session->fork()};
           })
      .def(
          "keep",
          [](NativeSession& s) {
            std::shared_ptr<Session> session = s.get();
            nb::gil_scoped_release release;
            session->engine()->sessions().keep(session);
          },
          "Kept for reuse only: from now on the engine may let go of it when memory is short, the one kept longest ago first.")
      .def_prop_ro("evicted", [](NativeSession& s) { return !s.session || s.session->evicted(); }, "Whether the engine has let go of it, or it was closed.")
      .def(
          "start",
          [](NativeSession& s, nb::dict sampling, uint64_t max_tokens) {
            auto session = s.get();
            auto settings = sampling_from(sampling);
            nb::gil_scoped_release release;
            return new NativeDecoder(std::make_unique<Decoder>(session, settings, max_tokens));
          },
          nb::rv_policy::take_ownership, "sampling"_a, "max_tokens"_a)
      .def("close",
           [](NativeSession& s) {
             std::shared_ptr<Session> session = std::move(s.session);
             s.session.reset();
             nb::gil_scoped_release release;
             session.reset();
           })
      .def_prop_ro("tokens", [](NativeSession& s) {
        auto v = s.get()->view();
        return copy_array<int32_t>(v.tokens.data(), v.tokens.size());
      })
      .def_prop_ro("origins", [](NativeSession& s) {
        auto v = s.get()->view();
        return copy_array<uint8_t>(v.origins.data(), v.origins.size());
      })
      .def_prop_ro("length", [](NativeSession& s) { return s.get()->view().tokens.size(); })
      .def_prop_ro("pending", [](NativeSession& s) { return s.get()->view().pending; })
      .def_prop_ro("nbytes", [](NativeSession& s) { return s.get()->view().nbytes; })
      .def_prop_ro("busy", [](NativeSession& s) { return s.get()->busy(); });

  nb::class_<NativeDecoder>(m, "Decoder", "An open generation; always close it.")
      .def(
          "next",
          [](NativeDecoder& d, std::optional<Words> mask) -> nb::object {
            std::optional<DecodedToken> token;
            Signals signals;
            signals.run([&] { token = d.decoder->next(mask ? mask->data() : nullptr, mask ? mask->size() : 0, signals.poll()); });
            if (!token) return nb::none();
            return nb::make_tuple(token->token, token->logprob, nb::cast(token->top_ids), nb::cast(token->top_logprobs));
          },
          "mask"_a = nb::none())
      .def("close",
           [](NativeDecoder& d) {
             nb::gil_scoped_release release;
             d.decoder->close();
           })
      .def_prop_ro("limit", [](NativeDecoder& d) -> nb::object {
        switch (d.decoder->limit()) {
          case Decoder::Limit::max_tokens: return nb::str("max_tokens");
          case Decoder::Limit::context: return nb::str("context");
          default: return nb::none();
        }
      });
}

}  // namespace
}  // namespace lily::bind

NB_MODULE(_native, m) {
  using namespace lily::bind;
  m.doc() = "Lily's engine.";
  define_errors(m);
  m.def("devices", [] {
    nb::list list;
    for (const auto& info : lily::list_devices()) list.append(device_dict(info));
    return list;
  });
  m.def("set_kernel_root", &lily::metal::set_kernel_root, "folder"_a, "Where the Metal device finds its kernel sources.");
  m.def("metal_missing", &lily::metal_missing, "Why there is no Metal device here; empty when there is one.");
  m.def(
      "plan",
      [](nb::dict spec, nb::list weights, const std::string& device) {
        lily::Policy policy = lily::Policy::from_environment();
        policy.traits = lily::device_traits(device);
        lily::Model model(spec_from(spec), weights_from(weights), lily::DType::bf16);
        return plan_dict(model, policy, lily::Engine::default_chunk(model, policy));
      },
      "spec"_a, "weights"_a, "device"_a = "auto", "The programs of a configuration, recorded without a device.");
  define_model(m);
  define_session(m);
  define_session_io(m);
  define_limits(m);
  define_clock(m);
  define_testing(m);
  define_selftest(m);
}
