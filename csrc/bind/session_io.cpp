// Sessions as dicts of arrays and back; the file format is Python's.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind/session_io.hpp"
#include "bind/types.hpp"
#include "engine/session_io.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily::bind {
namespace {

// A read-only view that keeps the image alive.
nb::object view(const std::shared_ptr<SessionImage>& image, SessionImage::Bytes bytes) {
  nb::capsule owner(new std::shared_ptr<SessionImage>(image), [](void* p) noexcept { delete static_cast<std::shared_ptr<SessionImage>*>(p); });
  return nb::ndarray<nb::numpy, const uint8_t>(bytes.data(), {bytes.size()}, owner).cast();
}

nb::dict export_dict(NativeSession& s) {
  auto image = std::make_shared<SessionImage>();
  {
    std::shared_ptr<Session> session = s.get();
    nb::gil_scoped_release release;
    *image = export_session(*session);
  }
  nb::dict d;
  d["tokens"] = copy_array<int32_t>(image->tokens.data(), image->tokens.size());
  d["origins"] = copy_array<uint8_t>(image->origins.data(), image->origins.size());
  d["consumed"] = image->consumed;
  nb::list states, kv, snapshots;
  for (auto bytes : image->states) states.append(view(image, bytes));
  for (auto bytes : image->kv) kv.append(view(image, bytes));
  for (const auto& p : image->snapshots) snapshots.append(nb::make_tuple(p.position, p.state, p.marked));
  d["states"] = states;
  d["kv"] = kv;
  d["snapshots"] = snapshots;
  return d;
}

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

NativeSession import_dict(NativeModel& m, Array<int32_t> tokens, Array<uint8_t> origins, uint32_t consumed, std::vector<Array<uint8_t>> states, nb::list snapshots,
                          std::vector<Array<uint8_t>> kv) {
  SessionImage image;
  image.tokens.assign(tokens.data(), tokens.data() + tokens.size());
  image.origins.assign(origins.data(), origins.data() + origins.size());
  image.consumed = consumed;
  for (const auto& a : states) image.states.emplace_back(a.data(), a.size());
  for (const auto& a : kv) image.kv.emplace_back(a.data(), a.size());
  for (nb::handle h : snapshots) {
    try {
      nb::tuple p = nb::cast<nb::tuple>(h);
      if (p.size() != 3) throw nb::cast_error();
      image.snapshots.push_back({nb::cast<uint32_t>(p[0]), nb::cast<uint32_t>(p[1]), nb::cast<bool>(p[2])});
    } catch (const nb::cast_error&) {
      throw InvalidArgument("saved session: snapshots are (position, state, marked)");
    }
  }
  std::shared_ptr<Engine> engine = m.get();
  nb::gil_scoped_release release;
  return NativeSession{import_session(engine, image)};
}

}  // namespace

void define_session_io(nb::module_& m) {
  m.def("export_session", &export_dict, "session"_a, "Everything a session holds, as arrays of bytes; views of memory that does not change.");
  m.def("import_session", &import_dict, "model"_a, "tokens"_a, "origins"_a, "consumed"_a, "states"_a, "snapshots"_a, "kv"_a,
        "A session from what export_session gave. ValueError when it does not fit the model.");
}

}  // namespace lily::bind
