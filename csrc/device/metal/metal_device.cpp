#include "device/metal/metal_device.hpp"

#include <algorithm>
#include <unistd.h>

#include "base/error.hpp"
#include "base/thread.hpp"
#include "device/metal/awake.hpp"
#include "device/metal/flight.hpp"
#include "device/metal/settings.hpp"
#include "device/metal/tensor_choice.hpp"
#include "device/metal/timeline.hpp"
#include "device/metal/weights.hpp"

namespace lily {
namespace metal {
namespace {

constexpr double kShort = 1e-3;           // seconds
constexpr auto kRest = std::chrono::seconds(2);  // idle for so long, the Mac may sleep again

DeviceInfo describe_device(const Limits& l, bool float32, const std::string& tensor) {
  DeviceInfo info;
  info.kind = "metal";
  info.name = float32 ? "metal:float32" : "metal";
  info.isa = "Metal, Apple GPU family " + std::to_string(l.family);
  info.storage = float32 ? "float32" : "bfloat16";
  info.memory_bytes = l.working_set;
  info.advice = ", or raise the system's limit for GPUs: sudo sysctl iogpu.wired_limit_mb=MEGABYTES";
  info.description = l.name + ", macOS " + std::to_string(l.os / 100) + "." + std::to_string(l.os % 100) + ", " + tensor + (l.low_power ? ", low power mode is on" : "") +
                     (float32 ? ", everything in float32 (for debugging)" : "");
  return info;
}

std::string shown(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", seconds);
  return text;
}

class MetalDevice : public Device {
 public:
  MetalDevice(DType storage, const Settings& settings)
      : storage_(storage), settings_(settings), gpu_(Gpu::open(storage == DType::f32)), tuning_(Tuning::from_environment()),
        timeline_(std::make_shared<Timeline>(gpu_->m)), pace_(settings_.slice), process_(int(getpid())), awake_(gpu_->m, settings_.keep_awake) {
    {
      Pool pool(gpu_->m);
      queue_ = gpu_->new_queue(2 * uint64_t(settings_.in_flight) + 2);
    }
    worker_ = Thread([this] { work(); });
    try {
      tensor_ = choose_tensor(gpu_->limits(), settings_, storage_, [this] { return probe(); });
    } catch (...) {
      stop();
      throw;
    }
    apply(tensor_, tuning_);
  }

  ~MetalDevice() override { stop(); }

  // The self-check of the tensor operations, on a device of its own: whatever happens there, this one is as it was.
  TensorChoice probe() const {
    Settings apart = settings_;
    apart.tensor = Settings::Tensor::off;
    apart.timeout = std::min(apart.timeout, 10.0);
    MetalDevice other(DType::bf16, apart);
    return examine_tensor(*other.gpu_, other);
  }

  DeviceInfo info() const override { return describe_device(gpu_->limits(), storage_ == DType::f32, tensor_.shown()); }
  const TensorChoice& tensor() const { return tensor_; }
  DType storage() const override { return storage_; }
  DeviceTraits traits() const override {
    DeviceTraits t = gpu_traits();
    if (tensor_.use && tensor_.one_tile && !t.tile_rows) t.tile_rows = 32;
    return t;
  }
  BufferPtr allocate(uint64_t bytes) override { return std::make_shared<MetalBuffer>(gpu_, bytes); }
  BufferPtr wrap(const uint8_t* data, uint64_t bytes, std::shared_ptr<void>) override {
    auto copy = std::make_shared<MetalBuffer>(gpu_, bytes);
    std::memcpy(copy->host(), data, bytes);
    return copy;
  }
  std::vector<Binding> load(const std::vector<FileRange>& ranges, const LoadProgress& progress) override {
    Awake awake(gpu_->m, settings_.keep_awake);
    awake.begin();
    return load_weights(gpu_, ranges, progress);
  }
  PreparedPtr prepare(std::vector<Dispatch> dispatches, Stages stages) override { return prepare_program(*gpu_, tuning_, std::move(dispatches), std::move(stages)); }

  TicketPtr submit(Submission submission) override {
    if (int(getpid()) != process_) throw DeviceError("this device was opened before a fork, and Metal does not work after one; load the model in the child process");
    auto flight = std::make_shared<Flight>();
    flight->ticket = std::make_shared<Ticket>();
    flight->program = std::static_pointer_cast<const MetalProgram>(submission.program);
    flight->submission = std::move(submission);
    {
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      if (fail_step_ >= 0 && fail_step_-- == 0) flight->fail_stage = fail_stage_;
      flight->clock = clock_;
      in_flight_++;
      arrived_.push_back(flight);
    }
    timeline_->wake.notify_all();
    return flight->ticket;
  }

  int in_flight() const override {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    return in_flight_;
  }
  Counters counters() const override {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    return counters_;
  }
  void set_clock(StageTimes clock) override {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    clock_ = std::move(clock);
  }
  void fail_at(int step, int stage) override {
    std::lock_guard<std::mutex> lock(timeline_->mutex);
    fail_step_ = step;
    fail_stage_ = stage;
  }

 private:
  // A command buffer on the GPU.
  struct Part {
    uint64_t id;
    FlightPtr flight;
    size_t begin, end;
    double estimated;
    double committed;  // by the clock that stands still while the machine sleeps
  };

  void stop() {
    {
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      stop_ = true;
    }
    timeline_->wake.notify_all();
    worker_.join();
  }

  void work() {
    for (;;) {
      std::deque<FlightPtr> arrived;
      std::deque<Completion> done;
      bool rested = false;
      {
        std::unique_lock<std::mutex> lock(timeline_->mutex);
        auto news = [&] { return !arrived_.empty() || !timeline_->done.empty() || (stop_ && flights_.empty()); };
        if (!encodable()) {
          if (parts_.empty() && !awake_.held())
            timeline_->wake.wait(lock, news);
          else if (parts_.empty())
            rested = !timeline_->wake.wait_for(lock, kRest, news);
          else
            timeline_->wake.wait_for(lock, std::chrono::milliseconds(200), news);
        }
        arrived.swap(arrived_);
        done.swap(timeline_->done);
        if (stop_ && flights_.empty() && arrived.empty()) break;
      }
      if (rested) awake_.end();
      if (!arrived.empty()) awake_.begin();
      for (FlightPtr& f : arrived) flights_.push_back(std::move(f));
      for (Completion& c : done) settle(c);
      if (FlightPtr f = encodable()) advance(*f, f);
      if (!parts_.empty() && gpu_->m.awake_seconds() - parts_.front().committed > settings_.timeout)
        lose("the GPU has not answered for " + shown(settings_.timeout) + " seconds; when it does, the model works again");
      retire();
    }
    awake_.end();
  }

  // The first flight of which something is left to encode, if the GPU may take it now.
  FlightPtr encodable() const {
    if (full()) return nullptr;
    for (const FlightPtr& f : flights_) {
      if (f->ended) continue;
      // Looked at one by one, or with grids that the host reads: nothing else is on the way.
      return (f->one_by_one() || settings_.host_grids) && !parts_.empty() ? nullptr : f;
    }
    return nullptr;
  }

  // A decode step is two submissions, the forward pass and the sampler's few microseconds: short ones do not count, or the GPU would wait between steps.
  bool full() const {
    if (settings_.in_flight == 1) return !parts_.empty();
    int large = 0;
    for (const Part& p : parts_) large += p.estimated * pace_.scale() >= kShort;
    return large >= settings_.in_flight || int(parts_.size()) >= 2 * settings_.in_flight;
  }

  void advance(Flight& f, const FlightPtr& shared) {
    const Submission& s = f.submission;
    if (!lost_.empty()) return f.end(Ticket::Status::failed, -1, lost_);
    if (s.after && s.after->status() != Ticket::Status::pending && s.after->status() != Ticket::Status::done) return f.end(Ticket::Status::skipped, -1);
    if (f.next == 0 && s.observe && f.single.empty())
      for (const auto& stage : f.program->stages)
        for (uint32_t d : stage) f.single.push_back({d});
    const size_t stages = f.stages().size();
    if (f.next >= stages) return f.end(Ticket::Status::done, -1);
    if (s.cancel && s.cancel->load(std::memory_order_relaxed)) return f.end(Ticket::Status::cancelled, int(f.next));
    if (int(f.next) == f.fail_stage) return f.end(Ticket::Status::failed, int(f.next), "a fault was injected by a test");
    size_t end = f.one_by_one() ? f.next + 1 : pace_.cut(*f.program, f.next);
    if (f.fail_stage > int(f.next)) end = std::min(end, size_t(f.fail_stage));
    if (settings_.host_grids) end = before_grid(f, end);
    try {
      encode(f, shared, end);
    } catch (const GPUError& e) {
      return f.end(Ticket::Status::failed, e.stage, e.log);
    } catch (const std::exception& e) {
      return f.end(Ticket::Status::failed, int(f.next), e.what());
    }
    f.next = end;
    if (f.next >= stages) f.ended = true;
  }

  // Cut so that a grid is read only after the command buffer that writes it.
  static size_t before_grid(const Flight& f, size_t end) {
    for (size_t stage = f.next + 1; stage < end; stage++)
      for (uint32_t d : f.stages()[stage])
        if (f.program->dispatches[d].indirect >= 0) return stage;
    return end;
  }

  void encode(Flight& f, const FlightPtr& shared, size_t end) {
    const Messages& m = gpu_->m;
    Pool pool(m);
    gpu_->commit_residency();
    Object buffer = m.command_buffer(queue_.get());
    if (!buffer) throw GPUError(int(f.next), "Metal gave no command buffer");
    const Dispatch& first = f.program->dispatches[f.stages()[f.next].front()];
    m.set_label(buffer, string_of(m, "lily " + first.label + ", stages " + std::to_string(f.next) + " to " + std::to_string(end - 1)));
    const uint32_t read = encode_stages(m, buffer, *f.program, f.stages(), f.next, end, f.submission.bindings, {settings_.concurrent, settings_.host_grids});
    double estimated = 0;
    if (f.single.empty())
      for (size_t i = f.next; i < end; i++) estimated += f.program->seconds[i];
    parts_.push_back({next_id_, shared, f.next, end, estimated, m.awake_seconds()});
    f.outstanding++;
    commit(timeline_, buffer, next_id_++);
    if (read) {
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      counters_.host_reads += read;
    }
  }

  void settle(const Completion& c) {
    auto at = std::find_if(parts_.begin(), parts_.end(), [&](const Part& p) { return p.id == c.id; });
    if (at == parts_.end()) {  // given up before; when all of them have ended the GPU is there again
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      if (silent_ && timeline_->kept.empty()) lost_.clear(), silent_ = false;
      return;
    }
    const Part part = *at;
    parts_.erase(at);
    Flight& f = *part.flight;
    f.outstanding--;
    if (c.lost) lost_ = c.error, silent_ = false;
    if (!c.ok) {
      const Dispatch& first = f.program->dispatches[f.stages()[part.begin].front()];
      return f.end(Ticket::Status::failed, int(part.begin), c.error + " [stages " + std::to_string(part.begin) + " to " + std::to_string(part.end - 1) + ", from " + first.label + "]");
    }
    if (f.single.empty()) pace_.learn(part.estimated, c.seconds);
    if (f.clock) f.seconds.push_back(c.seconds);
    if (f.submission.observe && f.result == Ticket::Status::done) {
      try {
        f.submission.observe(f.program->dispatches[f.stages()[part.begin].front()], f.submission.bindings);
      } catch (const std::exception& e) {
        f.end(Ticket::Status::failed, int(part.begin), e.what());
      }
    }
  }

  // Submissions end in the order in which they came.
  void retire() {
    while (!flights_.empty() && flights_.front()->ended && flights_.front()->outstanding == 0) {
      FlightPtr f = std::move(flights_.front());
      flights_.pop_front();
      const TicketPtr& after = f->submission.after;
      if (f->result == Ticket::Status::done && after && after->status() != Ticket::Status::done) f->end(Ticket::Status::skipped, -1);
      if (f->result == Ticket::Status::done && f->clock && f->single.empty()) f->clock(f->submission.program, f->seconds);
      finish(*f);
    }
  }

  void finish(Flight& f) {
    f.submission.bindings = {};
    {
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      in_flight_--;
      if (f.result == Ticket::Status::done) {
        counters_.submissions++;
        counters_.stages += f.stages().size();
        counters_.dispatches += f.program->dispatches.size();
      }
    }
    f.ticket->finish(f.result, f.stage, f.log);
  }

  // Everything under way fails. What the GPU may still write to is given back when it has answered.
  void lose(const std::string& why) {
    lost_ = why;
    silent_ = true;
    {
      std::lock_guard<std::mutex> lock(timeline_->mutex);
      for (const Part& p : parts_) timeline_->kept[p.id] = std::make_shared<BindingSet>(p.flight->submission.bindings);
      for (const Completion& c : timeline_->done) timeline_->kept.erase(c.id);  // heard of in the meantime
    }
    for (FlightPtr& f : flights_) {
      f->outstanding = 0;
      f->end(Ticket::Status::failed, int(f->next), why);
    }
    parts_.clear();
  }

  DType storage_;
  Settings settings_;
  std::shared_ptr<Gpu> gpu_;
  Tuning tuning_;
  std::shared_ptr<Timeline> timeline_;
  Pace pace_;
  int process_;
  TensorChoice tensor_;
  Owned queue_;
  Thread worker_;
  // under the timeline's mutex
  std::deque<FlightPtr> arrived_;
  int in_flight_ = 0, fail_step_ = -1, fail_stage_ = -1;
  bool stop_ = false;
  Counters counters_;
  StageTimes clock_;
  // of the worker alone
  std::deque<FlightPtr> flights_;
  std::deque<Part> parts_;
  uint64_t next_id_ = 1;
  std::string lost_;     // why nothing runs any more
  bool silent_ = false;  // because the GPU does not answer: it may yet
  Awake awake_;
};

}  // namespace
}  // namespace metal

DevicePtr make_metal_device(DType storage) { return std::make_shared<metal::MetalDevice>(storage, metal::Settings::from_environment()); }

std::vector<DeviceInfo> metal_device_infos() {
  metal::Limits limits;
  std::string reason;
  if (!metal::read_limits(limits, reason)) return {};
  std::string tensor;
  try {
    const metal::Settings settings = metal::Settings::from_environment();
    tensor = metal::tensor_gate(limits, settings);
    // Only a GPU that may have them is asked in full, and only once.
    if (tensor.empty()) {
      tensor = metal::MetalDevice(DType::bf16, settings).tensor().shown();
    } else {
      tensor = metal::TensorChoice{false, false, tensor}.shown();
    }
  } catch (const Error& e) {
    tensor = e.what();
  }
  return {metal::describe_device(limits, false, tensor), metal::describe_device(limits, true, metal::TensorChoice{false, false, "activations in float32"}.shown())};
}

std::string metal_missing() {
  metal::Limits limits;
  std::string reason;
  return metal::read_limits(limits, reason) ? "" : reason;
}

}  // namespace lily
