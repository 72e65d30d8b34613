// The table of messages, filled with functions that record, check, and do what Metal would.
#include "standin.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "../../csrc/device/shader/sim_abi.h"

#define LILY_EXPORT extern "C" __attribute__((visibility("default")))

namespace lily_standin {

World& world() {
  static World* w = new World;
  return *w;
}
Buf::~Buf() { std::free(data); }

namespace {

using lily::metal::Messages;
using lily::metal::Object;

thread_local std::vector<std::vector<Obj*>> pools;

template <class T, class... A>
T* make(A&&... a) {
  T* o = new T(std::forward<A>(a)...);
  World& w = world();
  w.objects.push_back(o);
  o->name = o->cls.substr(o->cls.rfind("MTL", 0) == 0 ? 3 : 0) + " " + std::to_string(++w.named[o->cls]);
  return o;
}

template <class T>
T* autoreleased(T* o) {
  if (pools.empty()) world().complain(o->cls + " was autoreleased where there is no pool: it leaks");
  else pools.back().push_back(o);
  return o;
}

void drop(Obj* o) {
  World& w = world();
  if (o->refs <= 0) return w.complain(o->name + " was released once too often");
  if (--o->refs > 0) return;
  if (auto* p = dynamic_cast<Pipeline*>(o); p && p->uses) w.complain(p->name + " was given back while command buffers use it");
  for (Obj* other : w.objects)
    if (auto* set = dynamic_cast<ResidencySet*>(other); set && set->refs > 0 && set->resident.count(static_cast<Buf*>(o)))
      w.complain(o->name + " was given back while a residency set names it");
  if (auto* b = dynamic_cast<Buf*>(o)) {
    if (b->uses) w.complain(b->name + " was given back while " + std::to_string(b->uses) + " command buffers use it");
    std::free(b->data);
    b->data = nullptr;
  }
}

std::string shown(Object o) { return o ? static_cast<Obj*>(o)->name : "nil"; }
std::string shown(uint64_t v) { return std::to_string(v); }
std::string shown(int64_t v) { return std::to_string(v); }
std::string shown(bool v) { return v ? "yes" : "no"; }
std::string shown(const std::string& s) { return s; }
std::string shown(const MtlSize& s) { return "(" + std::to_string(s.width) + ", " + std::to_string(s.height) + ", " + std::to_string(s.depth) + ")"; }

// What is handed over must be alive too.
void look(const char* selector, Object o) {
  if (o && static_cast<Obj*>(o)->refs <= 0) world().complain(std::string(selector) + " was given " + static_cast<Obj*>(o)->name + ", which is gone");
}
template <class T>
void look(const char*, const T&) {}

// Records a message and says which fault it meets, "" for none. Called with the world locked.
template <class... A>
std::string enter(Object self, const char* cls, const char* selector, const A&... a) {
  World& w = world();
  auto* o = static_cast<Obj*>(self);
  if (!o) {
    w.complain(std::string(selector) + " was sent to nil");
  } else {
    if (o->refs <= 0) w.complain(std::string(selector) + " was sent to " + o->name + ", which is gone");
    if (std::strcmp(cls, "NSObject") != 0 && o->cls != cls) w.complain(std::string(selector) + " was sent to a " + o->cls + ", expected a " + cls);
  }
  (look(selector, a), ...);
  const std::string of_class = std::string(cls) + " " + selector;
  w.sent[selector]++;
  w.sent[of_class]++;
  if (w.recording) {
    std::string line = (o ? o->name : "nil") + " " + selector;
    ((line += " " + shown(a)), ...);
    w.log.push_back(std::move(line));
  }
  for (size_t i = 0; i < w.faults.size(); i++) {
    if ((w.faults[i].selector != selector && w.faults[i].selector != of_class) || w.faults[i].nth-- > 0) continue;
    std::string action = w.faults[i].action;
    w.faults.erase(w.faults.begin() + long(i));
    return action;
  }
  return "";
}

#define LOCKED std::lock_guard<std::recursive_mutex> lock(world().mutex)

Object refuse(Object* error, const std::string& text, const char* domain = "MTLLibraryErrorDomain", int64_t code = 3) {
  if (error) *error = autoreleased(make<Err>(text, domain, code));
  return nullptr;
}

struct Class : Obj {
  explicit Class(const char* n) : Obj("class") { name = n; }
};
Obj* class_object(const std::string& name) {
  static std::map<std::string, Obj*> classes;
  auto& c = classes[name];
  if (!c) (c = new Class(name.c_str()))->cls = name;
  return c;
}

Obj* the_device() {
  static Obj* d = [] {
    Obj* o = new Obj("MTLDevice");
    o->name = "Device";
    return o;
  }();
  return d;
}

bool declares(const std::string& source, const std::string& function) {
  return source.find("[[host_name(\"" + function + "\")]]") != std::string::npos || source.find("kernel void " + function + "(") != std::string::npos;
}

Object new_library(Object self, Object source, Object options, Object* error) {
  LOCKED;
  const std::string& text = static_cast<Str*>(source)->text;
  const auto* o = static_cast<Options*>(options);
  const size_t at = text.find("#line 1 \"");
  const std::string file = at == std::string::npos ? "" : text.substr(at + 9, text.find('"', at + 9) - at - 9);
  if (std::string fault = enter(self, "MTLDevice", "newLibraryWithSource:options:error:", file, o->language, o->math); !fault.empty())
    return refuse(error, file + ":1:1: error: a fault was injected");
  if (text.find("#include \"") != std::string::npos) return refuse(error, file + ": error: a quoted header is not found");
  const bool tensor = text.find("<MetalPerformancePrimitives/") != std::string::npos;
  const uint64_t wanted = tensor ? 4u << 16 : (3u << 16) + 1;
  if (o->language < wanted) return refuse(error, file + ": error: language version " + std::to_string(o->language) + " is below " + std::to_string(wanted));
  if (tensor && world().property("os", 1505) < 2600) return refuse(error, file + ": error: invalid value for the language version");
  if (o->math != 0 || o->functions != 1) return refuse(error, file + ": error: fast mathematics would change the bits");
  auto* l = make<Library>();
  l->source = text;
  l->float32 = text.rfind("#define LILY_STORAGE_FLOAT32", 0) == 0;
  return l;
}

Object new_function(Object self, Object name, Object constants, Object* error) {
  LOCKED;
  auto* l = static_cast<Library*>(self);
  const std::string& host_name = static_cast<Str*>(name)->text;
  if (!enter(self, "MTLLibrary", "newFunctionWithName:constantValues:error:", host_name).empty()) return refuse(error, "a fault was injected");
  if (!declares(l->source, host_name)) return refuse(error, "no function " + host_name);
  static const std::map<uint64_t, std::string> kTypes{{53, "bool"}, {33, "uint"}, {29, "int"}, {3, "float"}};
  auto* f = make<Function>();
  f->host_name = host_name;
  f->float32 = l->float32;
  for (const auto& [index, value] : static_cast<Constants*>(constants)->values) {
    const std::string attribute = " [[function_constant(" + std::to_string(index) + ")]]";
    const size_t at = l->source.find(attribute), line = at == std::string::npos ? at : l->source.rfind('\n', at) + 1;
    const auto type = kTypes.find(value.first);
    if (at != std::string::npos && (type == kTypes.end() || l->source.compare(line, 10 + type->second.size(), "constant " + type->second + " ") != 0))
      return refuse(error, "function constant " + std::to_string(index) + " has another type");
    if (f->constants.size() <= index) f->constants.resize(index + 1);
    f->constants[index] = value.second;
  }
  return f;
}

Object new_pipeline(Object self, Object descriptor, uint64_t options, Object*, Object* error) {
  LOCKED;
  const auto* d = static_cast<PipelineDescriptor*>(descriptor);
  if (!enter(self, "MTLDevice", "newComputePipelineStateWithDescriptor:options:reflection:error:", d->function->host_name, d->threads, options).empty())
    return refuse(error, "a fault was injected", "AGXMetalG13X", 3);
  if (!d->whole) world().complain("a pipeline without whole simdgroups");
  auto* p = make<Pipeline>();
  p->function = d->function->host_name;
  p->constants = d->function->constants;
  p->threads = d->threads;
  p->float32 = d->function->float32;
  p->name = "pipeline " + p->function;
  for (uint32_t c : p->constants) p->name += ":" + std::to_string(c);
  return p;
}

bool usable(Encoder* e, const char* what) {
  if (!e->ended) return true;
  world().complain(std::string(what) + " after endEncoding");
  return false;
}

void record_dispatch(Encoder* e, Command c, const MtlSize& threads) {
  World& w = world();
  if (!usable(e, "a dispatch")) return;
  if (!e->pipeline) return w.complain("a dispatch without a pipeline");
  c.pipeline = e->pipeline;
  c.threads = uint32_t(threads.width * threads.height * threads.depth);
  if (c.threads == 0 || c.threads > e->pipeline->threads || c.threads % 32) w.complain(e->pipeline->name + ": " + std::to_string(c.threads) + " threads in a threadgroup");
  if (e->bytes[21].size() != 4) return w.complain(e->pipeline->name + ": no mask of bound buffers");
  std::memcpy(&c.present, e->bytes[21].data(), 4);
  c.args = e->bytes[20];
  c.label = e->label;
  c.reads = e->annotated ? e->touched.reads : ~0u;
  c.writes = e->annotated ? e->touched.writes : ~0u;
  for (uint32_t i = 0; i < 20; i++) {
    if (!(c.present >> i & 1)) continue;
    if (!e->buffers[i]) {
      w.complain(e->label + ": buffer " + std::to_string(i) + " is not set");
      continue;
    }
    c.buffers[i] = e->buffers[i];
    c.offsets[i] = e->offsets[i];
    c.bytes[i] = e->buffers[i]->length - e->offsets[i];
    if (e->annotated) c.bytes[i] = std::min(c.bytes[i], e->touched.bytes[i]);
  }
  e->annotated = false;
  e->buffer->passes.back().commands.push_back(std::move(c));
}

void commit(Object self) {
  LOCKED;
  World& w = world();
  auto* b = static_cast<CommandBuffer*>(self);
  b->fault = enter(self, "MTLCommandBuffer", "commit");
  if (b->open_pass) w.complain("a command buffer was committed while it is encoded");
  if (b->status != 0) return w.complain("a command buffer was committed twice");
  b->status = 2;
  if (++b->queue->outstanding > int(b->queue->limit)) w.complain("more command buffers than the queue holds: Metal would block");
  b->refs++;  // until it has ended
  std::set<Buf*> used;
  std::set<Pipeline*> pipelines;
  for (const Pass& pass : b->passes)
    for (const Command& c : pass.commands) {
      if (c.pipeline) pipelines.insert(c.pipeline);
      for (Buf* x : c.buffers)
        if (x) used.insert(x);
      if (c.indirect) used.insert(c.indirect);
    }
  for (Pipeline* p : pipelines) {
    if (p->refs <= 0) w.complain(p->name + " is gone, and a command buffer that is committed uses it");
    p->uses++;
  }
  for (Buf* x : used) {
    if (x->refs <= 0) w.complain(x->name + " is gone, and a command buffer that is committed uses it");
    x->uses++;
    bool resident = w.property("residency", 1) == 0;
    for (ResidencySet* set : b->queue->sets) resident = resident || (set->requested && set->resident.count(x));
    if (!resident) w.complain(x->name + " is not resident when a command buffer that uses it is committed");
  }
  submit(b);
}

Messages table() {
  Messages m{};
  m.retain = [](Object self) -> Object { LOCKED; enter(self, "NSObject", "retain"); static_cast<Obj*>(self)->refs++; return self; };
  m.release = [](Object self) { LOCKED; enter(self, "NSObject", "release"); if (self) drop(static_cast<Obj*>(self)); };
  // Strings come with nearly everything: they are in the log as arguments of what they are for.
  m.string = [](Object, const char* text, uint64_t encoding) -> Object { LOCKED; if (encoding != 4) world().complain("a string that is not UTF-8"); auto* s = make<Str>(text); s->name = '"' + std::string(text).substr(0, 80) + '"'; return autoreleased(s); };
  m.text = [](Object self) -> const char* { return static_cast<Str*>(self)->text.c_str(); };
  m.error_description = [](Object self) -> Object { return &static_cast<Err*>(self)->description; };
  m.error_code = [](Object self) -> int64_t { return static_cast<Err*>(self)->code; };
  m.error_domain = [](Object self) -> Object { return &static_cast<Err*>(self)->domain; };
  m.process_info = [](Object self) -> Object { LOCKED; enter(self, "NSProcessInfo", "processInfo"); return class_object("NSProcessInfo"); };
  m.begin_activity = [](Object self, uint64_t options, Object reason) -> Object { LOCKED; enter(self, "NSProcessInfo", "beginActivityWithOptions:reason:", options, reason); return autoreleased(make<Obj>("NSActivity")); };
  m.end_activity = [](Object self, Object activity) { LOCKED; enter(self, "NSProcessInfo", "endActivity:", activity); };
  m.low_power_mode = [](Object self) -> bool { LOCKED; enter(self, "NSProcessInfo", "isLowPowerModeEnabled"); return world().property("low_power", 0) != 0; };

  m.device_name = [](Object self) -> Object { LOCKED; enter(self, "MTLDevice", "name"); return autoreleased(make<Str>("Stand-in for Metal, simulated")); };
  m.supports_family = [](Object self, int64_t family) -> bool { LOCKED; enter(self, "MTLDevice", "supportsFamily:", family); return family <= 1000 + int64_t(world().property("family", 7)); };
  m.unified_memory = [](Object self) -> bool { LOCKED; enter(self, "MTLDevice", "hasUnifiedMemory"); return world().property("unified", 1) != 0; };
  m.working_set = [](Object self) -> uint64_t { LOCKED; enter(self, "MTLDevice", "recommendedMaxWorkingSetSize"); return uint64_t(world().property("working_set", 12.0 * (1ull << 30))); };
  m.max_buffer = [](Object self) -> uint64_t { LOCKED; enter(self, "MTLDevice", "maxBufferLength"); return uint64_t(world().property("max_buffer", 9.0 * (1ull << 30))); };
  m.max_threadgroup_memory = [](Object self) -> uint64_t { LOCKED; enter(self, "MTLDevice", "maxThreadgroupMemoryLength"); return uint64_t(world().property("threadgroup_memory", 32768)); };

  m.new_buffer = [](Object self, uint64_t length, uint64_t options) -> Object {
    LOCKED;
    if (!enter(self, "MTLDevice", "newBufferWithLength:options:", length, options).empty()) return nullptr;
    if (options != 0) world().complain("a buffer that the host does not share, or whose hazards are not tracked");
    if (length == 0 || double(length) > world().property("max_buffer", 9.0 * (1ull << 30))) return nullptr;
    auto* b = make<Buf>();
    b->length = length;
    b->data = static_cast<uint8_t*>(std::aligned_alloc(16384, (length + 16383) / 16384 * 16384));
    if (b->data) std::memset(b->data, 0xff, length);  // what was never written shows
    return b;
  };
  m.contents = [](Object self) -> void* { LOCKED; if (!enter(self, "MTLBuffer", "contents").empty()) return nullptr; return static_cast<Buf*>(self)->data; };
  m.alloc_residency = [](Object self) -> Object { LOCKED; enter(self, "MTLResidencySetDescriptor", "alloc"); return make<Obj>("MTLResidencySetDescriptor"); };
  m.init_residency = [](Object self) -> Object { LOCKED; enter(self, "MTLResidencySetDescriptor", "init"); return self; };
  m.new_residency_set = [](Object self, Object, Object* error) -> Object {
    LOCKED;
    if (!enter(self, "MTLDevice", "newResidencySetWithDescriptor:error:").empty()) return refuse(error, "a fault was injected");
    return make<ResidencySet>();
  };
  m.add_allocation = [](Object self, Object a) { LOCKED; enter(self, "MTLResidencySet", "addAllocation:", a); static_cast<ResidencySet*>(self)->pending.insert(static_cast<Buf*>(a)); };
  m.remove_allocation = [](Object self, Object a) { LOCKED; enter(self, "MTLResidencySet", "removeAllocation:", a); if (!static_cast<ResidencySet*>(self)->pending.erase(static_cast<Buf*>(a))) world().complain(shown(a) + " was not in the residency set"); };
  m.commit_residency = [](Object self) { LOCKED; enter(self, "MTLResidencySet", "commit"); auto* s = static_cast<ResidencySet*>(self); s->resident = s->pending; };
  m.request_residency = [](Object self) { LOCKED; enter(self, "MTLResidencySet", "requestResidency"); static_cast<ResidencySet*>(self)->requested = true; };
  m.end_residency = [](Object self) { LOCKED; enter(self, "MTLResidencySet", "endResidency"); static_cast<ResidencySet*>(self)->requested = false; };

  m.alloc_options = [](Object self) -> Object { LOCKED; enter(self, "MTLCompileOptions", "alloc"); return make<Options>(); };
  m.init_options = [](Object self) -> Object { LOCKED; enter(self, "MTLCompileOptions", "init"); return self; };
  m.set_language_version = [](Object self, uint64_t v) { LOCKED; enter(self, "MTLCompileOptions", "setLanguageVersion:", v); static_cast<Options*>(self)->language = v; };
  m.set_math_mode = [](Object self, int64_t mode) { LOCKED; enter(self, "MTLCompileOptions", "setMathMode:", mode); static_cast<Options*>(self)->math = mode; };
  m.set_math_functions = [](Object self, int64_t functions) { LOCKED; enter(self, "MTLCompileOptions", "setMathFloatingPointFunctions:", functions); static_cast<Options*>(self)->functions = functions; };
  m.set_fast_math = [](Object self, bool on) { LOCKED; enter(self, "MTLCompileOptions", "setFastMathEnabled:", on); static_cast<Options*>(self)->math = on ? 2 : 0; static_cast<Options*>(self)->functions = on ? 0 : 1; };
  m.new_library = new_library;
  m.alloc_constants = [](Object self) -> Object { LOCKED; enter(self, "MTLFunctionConstantValues", "alloc"); return make<Constants>(); };
  m.init_constants = [](Object self) -> Object { LOCKED; enter(self, "MTLFunctionConstantValues", "init"); return self; };
  m.set_constant = [](Object self, const void* value, uint64_t type, uint64_t index) {
    LOCKED;
    uint32_t bits = 0;
    std::memcpy(&bits, value, type == 53 ? 1 : 4);
    enter(self, "MTLFunctionConstantValues", "setConstantValue:type:atIndex:", uint64_t(bits), type, index);
    static_cast<Constants*>(self)->values[index] = {type, bits};
  };
  m.new_function = new_function;
  m.alloc_pipeline = [](Object self) -> Object { LOCKED; enter(self, "MTLComputePipelineDescriptor", "alloc"); return make<PipelineDescriptor>(); };
  m.init_pipeline = [](Object self) -> Object { LOCKED; enter(self, "MTLComputePipelineDescriptor", "init"); return self; };
  m.set_compute_function = [](Object self, Object f) { LOCKED; enter(self, "MTLComputePipelineDescriptor", "setComputeFunction:", f); static_cast<PipelineDescriptor*>(self)->function = static_cast<Function*>(f); };
  m.set_max_threads = [](Object self, uint64_t n) { LOCKED; enter(self, "MTLComputePipelineDescriptor", "setMaxTotalThreadsPerThreadgroup:", n); static_cast<PipelineDescriptor*>(self)->threads = n; };
  m.set_whole_simdgroups = [](Object self, bool on) { LOCKED; enter(self, "MTLComputePipelineDescriptor", "setThreadGroupSizeIsMultipleOfThreadExecutionWidth:", on); static_cast<PipelineDescriptor*>(self)->whole = on; };
  m.new_pipeline = new_pipeline;
  m.max_threads = [](Object self) -> uint64_t { LOCKED; enter(self, "MTLComputePipelineState", "maxTotalThreadsPerThreadgroup"); return std::min(static_cast<Pipeline*>(self)->threads, uint64_t(world().property("max_threads", 1024))); };
  m.simdgroup_width = [](Object self) -> uint64_t { LOCKED; enter(self, "MTLComputePipelineState", "threadExecutionWidth"); return uint64_t(world().property("simdgroup_width", 32)); };
  m.threadgroup_memory = [](Object self) -> uint64_t { LOCKED; enter(self, "MTLComputePipelineState", "staticThreadgroupMemoryLength"); return uint64_t(world().property("static_memory", 0)); };

  m.new_queue = [](Object self, uint64_t count) -> Object { LOCKED; if (!enter(self, "MTLDevice", "newCommandQueueWithMaxCommandBufferCount:", count).empty()) return nullptr; auto* q = make<Queue>(); q->limit = count; return q; };
  m.add_residency_set = [](Object self, Object set) { LOCKED; enter(self, "MTLCommandQueue", "addResidencySet:", set); static_cast<Queue*>(self)->sets.push_back(static_cast<ResidencySet*>(set)); };
  m.command_buffer = [](Object self) -> Object {
    LOCKED;
    if (!enter(self, "MTLCommandQueue", "commandBufferWithUnretainedReferences").empty()) return nullptr;
    auto* b = make<CommandBuffer>();
    b->queue = static_cast<Queue*>(self);
    b->name = "CommandBuffer";
    return autoreleased(b);
  };
  m.set_label = [](Object self, Object label) { LOCKED; enter(self, "MTLCommandBuffer", "setLabel:", label); };
  m.compute_encoder = [](Object self, uint64_t type) -> Object {
    LOCKED;
    auto* b = static_cast<CommandBuffer*>(self);
    if (!enter(self, "MTLCommandBuffer", "computeCommandEncoderWithDispatchType:", type).empty()) return nullptr;
    if (b->open_pass) world().complain("a second encoder on a command buffer that has one open");
    b->open_pass = true;
    b->passes.push_back({type == 1, {}});
    auto* e = make<Encoder>();
    e->buffer = b;
    e->name = "Encoder";
    return autoreleased(e);
  };
  m.set_pipeline = [](Object self, Object p) { LOCKED; auto* e = static_cast<Encoder*>(self); enter(self, "MTLComputeCommandEncoder", "setComputePipelineState:", p); if (usable(e, "a pipeline")) e->pipeline = static_cast<Pipeline*>(p); };
  m.set_buffer = [](Object self, Object buffer, uint64_t offset, uint64_t index) {
    LOCKED;
    auto* e = static_cast<Encoder*>(self);
    auto* b = static_cast<Buf*>(buffer);
    enter(self, "MTLComputeCommandEncoder", "setBuffer:offset:atIndex:", buffer, offset, index);
    if (!usable(e, "a buffer") || index >= 31) return world().complain("buffer index " + std::to_string(index));
    if (!b || b->refs <= 0) return world().complain("a buffer that is not there was set at index " + std::to_string(index));
    if (offset >= b->length || offset % 4) world().complain(b->name + ": offset " + std::to_string(offset) + " of " + std::to_string(b->length) + " bytes");
    e->buffers[index] = b;
    e->offsets[index] = offset;
  };
  m.set_bytes = [](Object self, const void* bytes, uint64_t length, uint64_t index) {
    LOCKED;
    auto* e = static_cast<Encoder*>(self);
    enter(self, "MTLComputeCommandEncoder", "setBytes:length:atIndex:", length, index);
    if (!usable(e, "bytes")) return;
    if (length == 0 || length > 4096 || index >= 31) return world().complain(std::to_string(length) + " bytes at index " + std::to_string(index));
    e->bytes[index].assign(static_cast<const char*>(bytes), length);
  };
  m.barrier = [](Object self, uint64_t scope) {
    LOCKED;
    auto* e = static_cast<Encoder*>(self);
    enter(self, "MTLComputeCommandEncoder", "memoryBarrierWithScope:", scope);
    if (scope != 1) world().complain("a barrier of another scope than buffers");
    if (!usable(e, "a barrier")) return;
    Command c;
    c.barrier = true;
    e->buffer->passes.back().commands.push_back(std::move(c));
  };
  m.dispatch = [](Object self, MtlSize groups, MtlSize threads) {
    LOCKED;
    enter(self, "MTLComputeCommandEncoder", "dispatchThreadgroups:threadsPerThreadgroup:", groups, threads);
    if (groups.width * groups.height * groups.depth == 0) world().complain("an empty grid");
    Command c;
    c.grid[0] = uint32_t(groups.width), c.grid[1] = uint32_t(groups.height), c.grid[2] = uint32_t(groups.depth);
    record_dispatch(static_cast<Encoder*>(self), std::move(c), threads);
  };
  m.dispatch_indirect = [](Object self, Object buffer, uint64_t offset, MtlSize threads) {
    LOCKED;
    auto* b = static_cast<Buf*>(buffer);
    enter(self, "MTLComputeCommandEncoder", "dispatchThreadgroupsWithIndirectBuffer:indirectBufferOffset:threadsPerThreadgroup:", buffer, offset, threads);
    if (!b || offset % 4 || offset + 12 > b->length) return world().complain("an indirect grid outside of its buffer");
    Command c;
    c.indirect = b;
    c.indirect_offset = offset;
    record_dispatch(static_cast<Encoder*>(self), std::move(c), threads);
  };
  m.end_encoding = [](Object self) { LOCKED; auto* e = static_cast<Encoder*>(self); enter(self, "MTLComputeCommandEncoder", "endEncoding"); if (usable(e, "endEncoding")) e->ended = true, e->buffer->open_pass = false; };
  m.add_completed_handler = [](Object, Object) { world().complain("addCompletedHandler: is sent through on_completed"); };
  m.commit = commit;
  m.status = [](Object self) -> uint64_t { LOCKED; return static_cast<CommandBuffer*>(self)->status; };
  m.error = [](Object self) -> Object { LOCKED; return static_cast<CommandBuffer*>(self)->error; };
  m.gpu_start = [](Object self) -> double { LOCKED; return static_cast<CommandBuffer*>(self)->start; };
  m.gpu_end = [](Object self) -> double { LOCKED; return static_cast<CommandBuffer*>(self)->end; };

  m.system_default_device = []() -> Object { LOCKED; if (world().property("gpu", 1) == 0) return nullptr; the_device()->refs++; return the_device(); };
  m.class_named = [](const char* name) -> Object { LOCKED; if (std::strcmp(name, "MTLResidencySetDescriptor") == 0 && world().property("residency", 1) == 0) return nullptr; return class_object(name); };
  m.responds = [](Object, const char* selector) -> bool { LOCKED; return std::strcmp(selector, "setMathMode:") != 0 || world().property("math_mode", 1) != 0; };
  m.push_pool = []() -> void* { pools.emplace_back(); return reinterpret_cast<void*>(pools.size()); };
  m.pop_pool = [](void* pool) {
    LOCKED;
    if (reinterpret_cast<void*>(pools.size()) != pool) return world().complain("pools end in another order than they began");
    for (Obj* o : pools.back()) drop(o);
    pools.pop_back();
  };
  m.on_completed = [](Object buffer, CompletedFn fn, void* context) {
    LOCKED;
    enter(buffer, "MTLCommandBuffer", "addCompletedHandler:");
    auto* b = static_cast<CommandBuffer*>(buffer);
    if (b->status != 0) world().complain("a handler was added after commit");
    b->handlers.push_back({fn, context});
  };
  m.awake_seconds = []() -> double { LOCKED; return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count() - world().property("slept", 0); };
  m.os_version = []() -> uint32_t { LOCKED; return uint32_t(world().property("os", 1505)); };
  m.annotate = [](Object encoder, const Touched& touched) {
    LOCKED;
    auto* e = static_cast<Encoder*>(encoder);
    e->touched = touched;
    e->label = touched.label;
    e->annotated = true;
  };
  return m;
}

std::string answer;
const char* joined(const std::vector<std::string>& lines) {
  answer.clear();
  for (const std::string& l : lines) answer += l + "\n";
  return answer.c_str();
}

}  // namespace
}  // namespace lily_standin

using namespace lily_standin;

LILY_EXPORT const lily::metal::Messages* lily_metal_standin(uint32_t version) {
  static const lily::metal::Messages m = table();
  return version == lily::metal::kMessagesVersion ? &m : nullptr;
}
LILY_EXPORT void lily_standin_set(const char* property, double value) { LOCKED; world().properties[property] = value; }
// The nth message from now on with this selector, or "class selector" (0 is the next) meets a fault: what it makes comes back as nil, with an error where there is one.
// commit: "error:CODE" fails on the GPU, "hang" never ends, "slow:MS" waits first.
LILY_EXPORT void lily_standin_fault(const char* selector, int nth, const char* action) { LOCKED; world().faults.push_back({selector, action, nth}); }
LILY_EXPORT void lily_standin_reset() { LOCKED; world().properties.clear(); world().faults.clear(); world().log.clear(); world().complaints.clear(); world().sent.clear(); world().named.clear(); world().recording = false; }
LILY_EXPORT void lily_standin_record(int on) { LOCKED; world().recording = on != 0; if (on) world().log.clear(); }
LILY_EXPORT const char* lily_standin_log() { LOCKED; return joined(world().log); }
LILY_EXPORT const char* lily_standin_complaints() { LOCKED; return joined(world().complaints); }
LILY_EXPORT uint64_t lily_standin_sent(const char* selector) { LOCKED; auto f = world().sent.find(selector); return f == world().sent.end() ? 0 : f->second; }
// Objects of a class that are still alive.
LILY_EXPORT uint64_t lily_standin_alive(const char* cls) { LOCKED; uint64_t n = 0; for (const Obj* o : world().objects) n += o->refs > 0 && o->cls == cls; return n; }
LILY_EXPORT const char* lily_standin_selectors() { LOCKED; std::vector<std::string> s; for (const auto& [name, n] : world().sent) s.push_back(name + " " + std::to_string(n)); return joined(s); }
