/* clang-format off */
/*
 * te_fl/plugin.h - the te-fl plugin ABI. C99, self-contained.
 *
 * A plugin is a shared library that exports one symbol, te_fl_plugin_query. Through it the host
 * learns who made the plugin, which ABI it speaks and, after create(), which devices it provides
 * and which ops it implements. Loader messages, tests and docs/abi-rules.md quote these rules by
 * number.
 *
 *  R1  te_fl_plugin_query is the only exported symbol. It is pure and may be called again: it
 *      touches no device, starts no thread, reads no file.
 *  R2  The major numbers of host and plugin must be equal. Before 2.0 nothing is kept: the minor
 *      numbers must be equal, too. From 2.0 on the plugin's minor may be older or newer, and a
 *      minor only adds: members and slots at the end of structs and tables, flags, enumerators,
 *      ops, arguments of ops. A plugin then states in min_host_minor the oldest host that it can
 *      do with, which need not be as new as its headers, and in `features` what a host must know
 *      or refuse. What was added later is found by size (R3). ABI 1.0 was withdrawn: a plugin of
 *      it is refused and is to be rebuilt.
 *  R3  Every struct that crosses begins with struct_size, set by its writer to sizeof (a plugin's
 *      header has it second, behind the magic). A reader uses only members that lie inside
 *      struct_size; members beyond it have their neutral value (zero unless the member says
 *      otherwise). A descriptor's or table's size that is no multiple of 8 is no struct's and is
 *      refused. Who fills in a struct of the other side's (te_fl_device_props, te_fl_saved) writes
 *      only inside its struct_size. Structs grow at the end only; reserved members are zero. No
 *      size is compared by ==. Structs without struct_size (te_fl_dtype, te_fl_device,
 *      te_fl_dltensor) and the parameters of functions stay as they are in a major.
 *  R4  In a table of functions a NULL slot means "absent". Slots marked "required" may not be
 *      NULL.
 *  R5  Nothing throws across the boundary; every function returns te_fl_status. Text goes to
 *      the error sink that the call was given; a NULL sink means that no text is wanted.
 *  R6  A status may carry TE_FL_CLEAN: nothing was written and nothing was enqueued, so the
 *      host may try the next implementation. TE_FL_UNSUPPORTED is always clean. Any other status
 *      without the mark goes back to the caller, from supports(), prepare() and workspace() as
 *      from run(). So do TE_FL_INVALID_ARGUMENT all the same, being the caller's mistake, and
 *      TE_FL_DEVICE_LOST, from whichever function, after which no op runs on the device. A status
 *      with any other bit, as a negative number has, is TE_FL_INTERNAL without the mark.
 *  R7  The plugin owns what it returns (headers, tables, descriptors, strings) and keeps it
 *      valid and unchanged from the call that returned it until destroy() returns (for the
 *      query's header: until the library is closed). The host owns what it passes and keeps it
 *      valid for the call only, except te_fl_host_api, which is valid until destroy() returns.
 *  R8  All state lives in the instance that create() returns. The plugin restores the current
 *      device, the floating-point environment and the signal handlers that it changes.
 *  R9  Plugins log through te_fl_host_api.log only.
 *  R10 supports() and workspace() read metadata only: they never touch tensor data, never
 *      allocate, never block. supports() is not called if TE_FL_OP_STATIC_SUPPORT says that its
 *      answer depends on static constraints alone, nor again for the very call (arguments,
 *      addresses and flags) that it accepted. What these and prepare() refuse follows from those,
 *      the device's kind and the settings alone, never from what may differ between the ranks of
 *      a job, as free memory does: ranks choose the same implementation.
 *  R11 run() enqueues on ctx->stream and returns; its status covers the enqueueing. It reads
 *      nothing but its arguments, writes only into the outputs it was given, allocates no memory
 *      that outlives the call, and uses ctx->workspace (256-byte aligned) for scratch. Tensors
 *      are aligned to their elements, and what lies behind them is not the call's.
 *  R12 The host checks arguments against the op's schema before run(): roles, dtypes, scaling
 *      modes, shapes, devices, scalar ranges. An implementation checks only what its schema
 *      cannot say, and answers TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN, naming argument, value and
 *      rule.
 *      Values in a device's memory (indices, positions) need not be waited for: an op that meets
 *      one which may not be writes NaN where it counts, stays inside its memory, and the device's
 *      next synchronize() of that stream or synchronize_event() answers TE_FL_INVALID_ARGUMENT,
 *      once, naming the op too. A call with TE_FL_CALL_VALIDATE looks at them before it writes.
 *  R13 Functions are called from any thread. run() of one implementation may be entered by
 *      several threads at once unless TE_FL_OP_THREAD_SAFE is absent; then the host serialises
 *      it. Where two such run each other's ops, a call that would wait for itself is TE_FL_BUSY.
 *  R14 create() has a time limit (TE_FL_PLUGIN_TIMEOUT_MS). A plugin that exceeds it is
 *      abandoned: it is reported, stays mapped and is never called again.
 *  R15 After quiesce() returns, no work of the plugin is running or enqueued. The host calls it
 *      when no thread is inside the plugin, nor inside another one's op on a device of it, and
 *      enqueues nothing more; until destroy(), threads that have objects of a device may still
 *      copy from them, wait and free. destroy() follows when nothing that the plugin made is
 *      referenced any more.
 *  R16 impl_id is "<kind>.<name>", kind being default, vendor or reference, lower case, dots
 *      and underscores allowed, unique per op; it is stable between releases: users write it
 *      into policies.
 *  R17 A custom op is named "vendor::op", brings its schema, and two schemas that differ under
 *      one name are refused.
 *  R18 One provider per DLPack device type and index space. A chip without a DLPack code uses
 *      kDLExtDev (12) with its provider name. Plugins that only add ops enumerate no device. An
 *      implementation for kDLExtDev is given the memory of one provider only: the one that its
 *      descriptor names, or else its plugin's own, which then must be one.
 *  R19 While a stream is captured, allocate() and free() on it work: memory that is allocated in a
 *      capture belongs to the graph and is given to nobody else while the graph exists or the
 *      memory has not been freed; memory that is freed in a capture stays valid for the graph's
 *      launches. The host takes the scratch of a captured op so, for every graph anew. run() with
 *      TE_FL_CALL_CAPTURING waits for nothing, reads no device memory from the host and takes the
 *      arguments it was given for those of every launch. prepare() is not called in a capture; a
 *      plan used in one is kept until its implementation goes.
 *  R20 What a minor adds reaches nobody who would misread it. A host gives a plugin no flag,
 *      enumerator, dtype or scaling mode that the plugin's minor lacks, unless ignoring it is
 *      right. A host ignores flags of an op descriptor that it does not know (they only ever add
 *      abilities), takes a status code that it does not know for TE_FL_INTERNAL, and leaves out,
 *      saying so, the catalogue's ops that it does not know of a plugin whose minor is newer than
 *      its own.
 *  R21 A plugin's settings are named TE_FL_<PLUGIN>_..., PLUGIN being its name in capitals, and are
 *      declared in its header (and, if its manifest has "settings", alike there). The host checks
 *      values against the declaration before create(); te_fl_host_api.setting hands them out. The
 *      plugin reads no TE_FL_ variable from the environment itself.
 *  R22 A stream belongs to one device. Handles of two devices may be equal; the host never takes
 *      one device's stream for another's. A stream that the plugin did not make may be used from
 *      any call on, without notice, until retire_stream() names it; its handle may then come again
 *      for another stream, which has nothing to do with it.
 *  R23 An argument that an op gained after its first form is marked TE_FL_ARG_LATER and has a
 *      neutral value. An implementation names those that it knows in te_fl_op_desc.later_args: a
 *      set, since it may know a newer one and not an older one. A call that sets another one goes
 *      past it, with a reason that names the argument.
 *  R24 A stream may wait for an event of another device of the same provider: of one whose table
 *      has the very same wait_event. The host hands over no event of another provider.
 *  R25 A program, a framework say, may install an allocator for a device (te_fl_allocator). All
 *      memory of kind DEVICE that the host then allocates there, for tensors, scratch and plugins,
 *      comes from it, and R19 and R22 bind it as they bind the device's own functions. It gives
 *      memory that the device's kernels may read and write, aligned as asked, and in use nowhere
 *      else; the host refuses other memory, naming the allocator. Its functions may be called by
 *      several threads at once. It is asked to trim() before an allocation of the device's memory
 *      fails, whoever made it.
 *  R26 A plan may own device memory if its implementation sets TE_FL_OP_PLAN_MEMORY: destroy_plan()
 *      is then called when the device has done the work of every call that had the plan, and of
 *      every launch of a graph that such a call was captured into, whichever streams it came on;
 *      whoever lets the implementation go launches these graphs no more. Any stream may use a plan
 *      as soon as prepare() has returned, which therefore waits for what it enqueued. Work on a
 *      stream that is being captured cannot be waited for: until the capture has ended, no plan
 *      that the stream worked with is destroyed, and who would unregister its implementation,
 *      deactivate its plugin or remove its device is told BUSY and why, before anything was
 *      changed.
 *  R27 An implementation that needs memory which is zero when its first op on a stream begins and
 *      then keeps what its ops leave there says so in te_fl_op_desc.stream_state_bytes, and finds
 *      it in ctx->stream_state. The memory belongs to one implementation, device and stream: its
 *      ops run there one after the other. It goes with the stream, the implementation or the
 *      device. A captured op has memory of its own, which is zero whenever the graph's launch
 *      comes to the op. Work on the host has no stream: who serves the host has no such memory.
 *  R28 Device memory that a plugin holds beyond a call comes from te_fl_host_api.allocate, so that
 *      a program's allocator (R25) and the account of what is held know of it. It is given back by
 *      the end of quiesce(), that of plans by destroy_plan(): memory of a device that is alive
 *      keeps the device, and with it the plugin that provides it.
 *  R29 A communicator (te_fl_communicator) is made by one provider of collectives (te_fl_comm_desc),
 *      and `maker` is the name of the plugin that has it. A call with one is considered for that
 *      plugin's implementations alone, which read its `self`. It belongs to the device of the call
 *      that it is given to. Its id is given once in a process, so that what is kept by it, as a plan
 *      is, never meets another communicator. A call with one is not staged, verified or replayed,
 *      and the first choice runs or the call is an error: the other ranks would not take part in
 *      anything else.
 *  R30 A scaling mode is what its te_fl_scaling_desc says, which te_fl_host_api.scaling hands out
 *      by number and whose name users write. Only where it has a second level may a tensor's
 *      column-wise copy have an amax of its own (te_fl_quant.columnwise_amax); where it has, that
 *      copy is read and written with it. Who makes both copies from the same values writes the
 *      same amax to both.
 *  R31 describe() says what run() would run for the call, by name, and what that was chosen by. It
 *      reads metadata alone, starts nothing and changes nothing: it is asked for `te-fl explain`
 *      and traces, where tensors may have no memory.
 *  R32 All ranks of a communicator call the same ops with it in the same order, from one thread at a
 *      time. An op on a device enqueues and returns, like any other (R11); one on the host returns
 *      when it is done. abort() is called from any thread, while ops of the communicator run or wait
 *      in others: each of them ends soon, with COMM_FAILED, as does every later one. An op that sees
 *      a failure of its own accord, a peer that closed its connection say, answers COMM_FAILED and
 *      says which rank it waited for, and the host then aborts the communicator. What is left of a
 *      failed communicator is destroy()ed, which waits for nobody then.
 *  R33 te_fl_comm_api.create() and split() wait for other ranks no longer than the config's
 *      timeout_ms, or return before these have come, and then ready() says when they have. Between
 *      group_start() and group_end(), which one thread calls, ops of communicators of the provider
 *      begin together: sends and receives of one group cannot wait for each other's order.
 */
/* clang-format on */
#ifndef TE_FL_PLUGIN_H_
#define TE_FL_PLUGIN_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TE_FL_INIT(...) = __VA_ARGS__ /* default member initialiser: C++ only */
extern "C" {
#else
#define TE_FL_INIT(...)
#endif

#if defined(__GNUC__)
#define TE_FL_PLUGIN_EXPORT __attribute__((visibility("default")))
#else
#define TE_FL_PLUGIN_EXPORT
#endif

/* For 64-bit little-endian machines. */
#define TE_FL_ABI_MAJOR 0u
#define TE_FL_ABI_MINOR 9u
#define TE_FL_PLUGIN_MAGIC 0x4c464554u /* "TEFL", little-endian */

/* ---- status ---- */

/* A te_fl_code, optionally or-ed with TE_FL_CLEAN (R6). */
typedef int32_t te_fl_status;

typedef enum te_fl_code {
  TE_FL_OK = 0,
  TE_FL_INVALID_ARGUMENT = 1, /* the caller's mistake */
  TE_FL_UNSUPPORTED = 2,      /* this implementation cannot; always clean */
  TE_FL_NOT_FOUND = 3,        /* no such op, implementation, plugin, device, file */
  TE_FL_ALREADY_EXISTS = 4,   /* duplicate registration */
  TE_FL_OUT_OF_MEMORY = 5,
  TE_FL_FAILED_PRECONDITION = 6, /* right call at the wrong time */
  TE_FL_INCOMPATIBLE = 7,        /* version or ABI mismatch */
  TE_FL_BUSY = 8,                /* still in use; e.g. deactivation from inside an op */
  TE_FL_TIMEOUT = 9,
  TE_FL_DEVICE_LOST = 10, /* sticky device error; the device is retired */
  TE_FL_DATA_LOSS = 11,   /* truncated or corrupt input */
  TE_FL_INTERNAL = 12,    /* a bug, or an error the plugin did not classify */
  TE_FL_COMM_FAILED = 13  /* another rank is gone, or late, or did something else (R32); the
                             communicator is aborted */
} te_fl_code;

#define TE_FL_CLEAN 0x10000
#define TE_FL_STATUS_CODE(status) ((status)&0xffff)
#define TE_FL_STATUS_IS_CLEAN(status) \
  (((status)&TE_FL_CLEAN) != 0 || TE_FL_STATUS_CODE(status) == TE_FL_UNSUPPORTED)

/* The sink for error text. The host owns it; `text` is copied. Later calls append as
 * cause lines. */
typedef struct te_fl_error_sink {
  uint32_t struct_size;
  uint32_t reserved;
  void* host;
  void (*write)(void* host, const char* text); /* required */
} te_fl_error_sink;

/* ---- dtypes, devices, tensors ---- */

/* Layout and codes of DLPack 1.1's DLDataType. */
typedef struct te_fl_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes; /* 1 */
} te_fl_dtype;

enum { /* DLDataTypeCode */
       TE_FL_CODE_INT = 0,
       TE_FL_CODE_UINT = 1,
       TE_FL_CODE_FLOAT = 2,
       TE_FL_CODE_OPAQUE = 3,
       TE_FL_CODE_BFLOAT = 4,
       TE_FL_CODE_COMPLEX = 5,
       TE_FL_CODE_BOOL = 6,
       TE_FL_CODE_FLOAT8_E4M3FN = 10,
       TE_FL_CODE_FLOAT8_E5M2 = 12,
       TE_FL_CODE_FLOAT8_E8M0FNU = 14,
       TE_FL_CODE_FLOAT4_E2M1FN = 17
};

/* te-fl's own numbering of the dtypes it knows; bit i of a dtype mask, which has 64 bits, stands
   for index i. */
typedef enum te_fl_dtype_index {
  TE_FL_F64 = 0,
  TE_FL_F32 = 1,
  TE_FL_F16 = 2,
  TE_FL_BF16 = 3,
  TE_FL_F8E4M3 = 4,
  TE_FL_F8E5M2 = 5,
  TE_FL_F4E2M1 = 6,
  TE_FL_F8E8M0 = 7,
  TE_FL_I8 = 8,
  TE_FL_I16 = 9,
  TE_FL_I32 = 10,
  TE_FL_I64 = 11,
  TE_FL_U8 = 12,
  TE_FL_U16 = 13,
  TE_FL_U32 = 14,
  TE_FL_U64 = 15,
  TE_FL_BOOL = 16,
  TE_FL_DTYPE_COUNT = 17
} te_fl_dtype_index;

#define TE_FL_BIT(index) ((uint64_t)1 << (index))
#define TE_FL_MASK_HIGH (TE_FL_BIT(TE_FL_F32) | TE_FL_BIT(TE_FL_F16) | TE_FL_BIT(TE_FL_BF16))
#define TE_FL_MASK_FP8 (TE_FL_BIT(TE_FL_F8E4M3) | TE_FL_BIT(TE_FL_F8E5M2))
#define TE_FL_MASK_ANY_DTYPE (TE_FL_BIT(TE_FL_DTYPE_COUNT) - 1)

/* Layout and codes of DLPack's DLDevice. */
typedef struct te_fl_device {
  int32_t type; /* DLDeviceType: 1 CPU, 2 CUDA, 3 CUDAHost, 4 OpenCL, 12 ExtDev, ... */
  int32_t index;
} te_fl_device;

enum { /* DLDeviceType, those that te-fl names */
       TE_FL_DEVICE_CPU = 1,
       TE_FL_DEVICE_CUDA = 2,
       TE_FL_DEVICE_CUDA_HOST = 3, /* pinned: counts as host and as device-accessible */
       TE_FL_DEVICE_OPENCL = 4,
       TE_FL_DEVICE_VULKAN = 7,
       TE_FL_DEVICE_METAL = 8,
       TE_FL_DEVICE_ROCM = 10,
       TE_FL_DEVICE_ROCM_HOST = 11,
       TE_FL_DEVICE_EXT = 12,
       TE_FL_DEVICE_ONEAPI = 14
};

/* Layout of DLPack's DLTensor. strides are in elements; NULL means compact row-major. */
typedef struct te_fl_dltensor {
  void* data;
  te_fl_device device;
  int32_t ndim;
  te_fl_dtype dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} te_fl_dltensor;

typedef enum te_fl_scaling {
  TE_FL_SCALING_NONE = 0,          /* not quantised */
  TE_FL_SCALING_TENSOR = 1,        /* one FP32 scale per tensor: delayed or current scaling */
  TE_FL_SCALING_BLOCK_1X128 = 2,   /* FP32 scale per 1x128 block */
  TE_FL_SCALING_BLOCK_128X128 = 3, /* FP32 scale per 128x128 block */
  TE_FL_SCALING_MXFP8 = 4,         /* E8M0 scale per 1x32 block */
  TE_FL_SCALING_NVFP4 = 5,         /* E4M3 scale per 1x16 block, FP32 amax per tensor */
  TE_FL_SCALING_COUNT = 6
} te_fl_scaling;

/* The place of the factors of a row-wise copy: one for each block of the matrix [M, K],
 * in an array of rank 2, row-major, whose extents are rounded up. */
typedef enum te_fl_scale_layout {
  TE_FL_SCALE_LAYOUT_ROWS = 0,   /* [blocks along M, blocks along K] */
  TE_FL_SCALE_LAYOUT_COLUMNS = 1 /* [blocks along K, blocks along M] */
} te_fl_scale_layout;

/* A scaling mode as data (R30). */
typedef struct te_fl_scaling_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_scaling_desc));
  uint32_t scaling TE_FL_INIT(0);      /* te_fl_scaling */
  const char* name TE_FL_INIT(NULL);   /* "mxfp8" */
  uint64_t dtypes TE_FL_INIT(0);       /* mask of the te_fl_dtype_index of the codes */
  uint32_t scale_dtype TE_FL_INIT(0);  /* te_fl_dtype_index of a factor */
  uint32_t second_level TE_FL_INIT(0); /* 1: factors are in units of an FP32 amax per tensor */
  /* Elements of the row-wise copy that share a factor; 0, 0: all, whose factor is alone. */
  uint32_t block_rows TE_FL_INIT(0);
  uint32_t block_cols TE_FL_INIT(0);
  uint32_t layout TE_FL_INIT(0);   /* te_fl_scale_layout */
  uint32_t pad_rows TE_FL_INIT(1); /* to what the blocks along M are rounded up, */
  uint32_t pad_cols TE_FL_INIT(1); /* and those along K */
  /* 1: the column-wise copy is the row-wise one of the transposed matrix. 0: it is [M, K], too,
     with blocks of block_cols by block_rows, rounded up by pad_cols and pad_rows. */
  uint32_t transposed TE_FL_INIT(0);
} te_fl_scaling_desc;

enum { /* te_fl_quant.flags */
       /* As an output: derive the scale from the data's amax (current scaling) and write `scale`,
          instead of reading `scale` (delayed scaling). Block modes always derive their scales. */
       TE_FL_QUANT_COMPUTE_SCALE = 1u << 0,
       TE_FL_QUANT_POW2_SCALE = 1u << 1 /* truncate derived scales to powers of two */
};

/* clang-format off */
/*
 * The quantised part of a tensor. For a logical tensor seen as a matrix [M, K] (K = last dimension,
 * M = product of the others):
 *   row-wise data: te_fl_tensor.dl.data, [M, K], may be NULL if only the column-wise copy exists.
 *     Compact, but for arguments that take strides (TE_FL_ARG_STRIDED_CODES).
 *   column-wise data: compact [K, M] (MXFP8: [M, K], not transposed).
 *   scale_inv, by scaling mode:
 *     TENSOR         FP32 [1]; one value serves both copies; columnwise_scale_inv is NULL or equal
 *     BLOCK_1X128    row-wise FP32 [ceil(K/128), roundup(M,4)]; column-wise
 *                    [ceil(M/128), roundup(K,4)]
 *     BLOCK_128X128  row-wise FP32 [ceil(M/128), roundup(ceil(K/128),4)]; column-wise
 *                    [ceil(K/128), roundup(ceil(M/128),4)]
 *     MXFP8          E8M0 [roundup(M,128), roundup(ceil(K/32),4)]; column-wise
 *                    [roundup(ceil(M/32),4), roundup(K,128)]
 *     NVFP4          E4M3 [roundup(M,128), roundup(ceil(K/16),4)]; column-wise of the transposed
 *   amax: FP32 [1]. As an output with a given scale (delayed scaling) it is a running maximum:
 *     amax = max(amax, amax of the data). With COMPUTE_SCALE it is set. Optional when the scale is
 *     given.
 *   columnwise_amax: FP32 [1], of modes with a second level: the column-wise copy's own amax (R30);
 *     NULL: amax is both copies'.
 *   scale: FP32 [1], TENSOR mode; read when quantising with a given scale, written under
 *     COMPUTE_SCALE.
 * All parts live on the tensor's device. An op fills every copy (row-wise, column-wise) that the
 * output has; padding elements of scale_inv are written as zero.
 */
/* clang-format on */
typedef struct te_fl_quant {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_quant));
  uint32_t scaling TE_FL_INIT(0); /* te_fl_scaling */
  uint32_t flags TE_FL_INIT(0);
  float amax_epsilon TE_FL_INIT(0); /* lower bound of amax when a scale is derived */
  void* columnwise_data TE_FL_INIT(NULL);
  void* scale_inv TE_FL_INIT(NULL);
  void* columnwise_scale_inv TE_FL_INIT(NULL);
  float* amax TE_FL_INIT(NULL);
  float* scale TE_FL_INIT(NULL);
  float* columnwise_amax TE_FL_INIT(NULL);
} te_fl_quant;

typedef struct te_fl_tensor {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_tensor));
  uint32_t provider TE_FL_INIT(0); /* host-assigned id of the device provider; 0 unless kDLExtDev */
  te_fl_dltensor dl;
  const te_fl_quant* quant TE_FL_INIT(NULL); /* NULL: not quantised */
} te_fl_tensor;

/* The record that a forward op keeps for its backward beyond tensors of fixed format. The
 * caller provides the struct and, if the implementation's saved_bytes() asks for it,
 * storage. */
typedef struct te_fl_saved {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_saved));
  uint32_t opaque TE_FL_INIT(0);         /* forward sets 1: only its own backward can read it */
  const char* producer TE_FL_INIT(NULL); /* host sets: impl_id of the forward, interned */
  const te_fl_tensor* storage TE_FL_INIT(NULL); /* U8 [bytes] on the op's device, or NULL */
} te_fl_saved;

/* The processes that call a collective op together, as an argument of it (R29). Made by the host of
   what te_fl_comm_api.create() or split() gave. */
typedef struct te_fl_communicator {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_communicator));
  uint32_t device_provider TE_FL_INIT(0); /* as te_fl_tensor.provider */
  te_fl_device device TE_FL_INIT({});
  int32_t rank TE_FL_INIT(0);         /* from 0 to size - 1 */
  int32_t size TE_FL_INIT(1);         /* the number of processes, at least 1 */
  uint64_t id TE_FL_INIT(0);          /* not 0; never given again */
  const char* maker TE_FL_INIT(NULL); /* name of the plugin that made it */
  void* self TE_FL_INIT(NULL);        /* the provider's own */
} te_fl_communicator;

/* ---- the call context ---- */

/* A chain of optional additions to a context. No type is defined yet; one that a reader does not
   know is passed over. */
typedef struct te_fl_extension {
  uint32_t struct_size;
  uint32_t type;
  const struct te_fl_extension* next;
} te_fl_extension;

/* Counter-based random state (Philox 4x32-10). An address, if it is not NULL, is one uint64 in the
   device's memory that is read when the op runs: the seed there wins over the member, the offset
   there is added to the member. The two are independent of each other. A captured graph so draws
   new numbers at every launch: the members are fixed in it, what lies at the addresses is not. */
typedef struct te_fl_rng {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_rng));
  uint32_t reserved TE_FL_INIT(0);
  uint64_t seed TE_FL_INIT(0);
  uint64_t offset TE_FL_INIT(0); /* in Philox counters: four words each */
  const uint64_t* seed_address TE_FL_INIT(NULL);
  const uint64_t* offset_address TE_FL_INIT(NULL);
} te_fl_rng;

enum {                                     /* te_fl_context.flags */
       TE_FL_CALL_DETERMINISTIC = 1u << 0, /* same inputs, same bits, or refuse */
       TE_FL_CALL_CAPTURING = 1u << 1,     /* the stream is being captured into a graph */
       /* TE_FL_VALIDATE=1, outside of captures: check what costs a wait, too (R12). */
       TE_FL_CALL_VALIDATE = 1u << 2
};

typedef struct te_fl_context {
  uint32_t struct_size;
  uint32_t flags;
  te_fl_device device;
  uint32_t provider;
  uint32_t reserved;
  void* stream;    /* borrowed; NULL is the device's default stream */
  void* workspace; /* workspace() bytes, 256-byte aligned; NULL if it asked for none */
  size_t workspace_bytes;
  void* plan;                     /* the result of prepare() for this signature, or NULL */
  const te_fl_rng* rng;           /* of ops with TE_FL_SCHEMA_USES_RNG never NULL */
  const te_fl_error_sink* errors; /* NULL: no text wanted */
  const te_fl_extension* extensions;
  void* stream_state; /* stream_state_bytes, 256-byte aligned (R27); NULL if it asked for none */
} te_fl_context;

/* ---- op schemas ---- */

typedef enum te_fl_arg_type {
  TE_FL_ARG_TENSOR = 0,       /* const te_fl_tensor* */
  TE_FL_ARG_TENSOR_LIST = 1,  /* const te_fl_tensor* const*, with an int64_t count member */
  TE_FL_ARG_BOOL = 2,         /* int32_t, 0 or 1 */
  TE_FL_ARG_I32 = 3,          /* int32_t */
  TE_FL_ARG_I64 = 4,          /* int64_t */
  TE_FL_ARG_F32 = 5,          /* float */
  TE_FL_ARG_F64 = 6,          /* double */
  TE_FL_ARG_ENUM = 7,         /* int32_t, one of enum_names */
  TE_FL_ARG_SAVED = 8,        /* te_fl_saved* */
  TE_FL_ARG_I64_LIST = 9,     /* const int64_t*, with an int64_t count member; host memory */
  TE_FL_ARG_COMMUNICATOR = 10 /* const te_fl_communicator* (R29) */
} te_fl_arg_type;

typedef enum te_fl_arg_role { TE_FL_IN = 0, TE_FL_OUT = 1, TE_FL_INOUT = 2 } te_fl_arg_role;

enum {                                 /* te_fl_arg_desc.flags */
       TE_FL_ARG_OPTIONAL = 1u << 0,   /* the pointer may be NULL (a list: count 0) */
       TE_FL_ARG_HOST = 1u << 1,       /* host memory wherever the op runs */
       TE_FL_ARG_ANY_MEMORY = 1u << 2, /* host or device */
       TE_FL_ARG_RAW_FP8 = 1u << 3,    /* FP8 codes without quantisation data are meant */
       TE_FL_ARG_QUANT_ONLY = 1u << 4, /* only the quantisation parts count; dl.data may be NULL */
       TE_FL_ARG_SAME_DTYPE = 1u << 5, /* dtype must equal that of `same_as` */
       TE_FL_ARG_ALLOW_OVERLAP = 1u
                                 << 6, /* strides may make elements overlap (inputs: broadcast) */
       TE_FL_ARG_OPAQUE = 1u << 7,     /* not compared, not poisoned by checkers */
       /* TENSOR scaling without column-wise copy may be strided */
       TE_FL_ARG_STRIDED_CODES = 1u << 8,
       TE_FL_ARG_LATER = 1u << 9 /* added after the op's first form (R23); behind all others */
};

/*
 * One argument. `shape` is a rule, compiled by the host at registration:
 *   rule    = "any" | dims | test " ? " dims " : " (dims, or once more a test and so on)
 *   dims    = "" (scalar, rank 0) or terms separated by spaces;  test = BOOL | ENUM " is " VALUE
 *   term    = "..." (leading dimensions, the same for all arguments; first term only)
 *           | "@..." (their product) | "@.../INT" (divided, rounded up) | "#LIST" (its length)
 *           | INT | "_" (any size) | NAME | INT*NAME | NAME+INT | ?NAME (1 or the value of NAME)
 * A NAME is bound by the first argument that mentions it and must agree afterwards. For tensor
 * lists the rule applies element by element, with names bound afresh for each index; names that
 * plain tensors bind hold for every element.
 * min/max bound scalars and integers of a list inclusively (both zero: unbounded). `neutral` is the
 * value at which the argument has no effect; an implementation that does not know a later argument
 * (R23) serves calls that leave it there (tensors: NULL).
 */
typedef struct te_fl_arg_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_arg_desc));
  uint8_t type TE_FL_INIT(0); /* te_fl_arg_type */
  uint8_t role TE_FL_INIT(0); /* te_fl_arg_role; scalars are IN */
  uint16_t reserved TE_FL_INIT(0);
  uint32_t flags TE_FL_INIT(0);
  uint32_t offset TE_FL_INIT(0);       /* of the member in the argument struct */
  uint32_t count_offset TE_FL_INIT(0); /* of a list's int64_t count */
  uint64_t dtypes TE_FL_INIT(0);       /* mask of te_fl_dtype_index */
  uint32_t scalings TE_FL_INIT(
      TE_FL_BIT(TE_FL_SCALING_NONE)); /* mask of te_fl_scaling; bit 0: unquantised allowed */
  uint32_t reserved2 TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL);
  const char* shape TE_FL_INIT(NULL);
  const char* inout_if TE_FL_INIT(NULL); /* INOUT: read only if this bool argument is 1 or this F32
                           is not 0; NULL: always. OUT: the op may leave it as it was if this
                           optional tensor (a no-op flag) is given */
  const char* aliases
      TE_FL_INIT(NULL); /* names of inputs this output may share memory with, space separated */
  const char* same_as TE_FL_INIT(NULL);    /* with SAME_DTYPE */
  const char* enum_names TE_FL_INIT(NULL); /* space separated, values from 0 */
  double neutral TE_FL_INIT(0);
  double min TE_FL_INIT(0);
  double max TE_FL_INIT(0);
  /* OUT: how its extents follow from the inputs where the shape rule alone does not say, as a
     formula for people and tools; NULL: the rule says it. */
  const char* extents TE_FL_INIT(NULL);
} te_fl_arg_desc;

enum { /* te_fl_op_schema.flags */
       TE_FL_SCHEMA_USES_RNG = 1u << 0,
       /* The op's class; neither bit: compute. */
       TE_FL_SCHEMA_ENQUIRY =
           1u << 1, /* reads metadata, writes host results, touches no device data */
       /* All ranks of a communicator run it. It is never staged and never checked by a second run,
          and the first choice runs or the call is an error: what falls back on one rank alone
          leaves the others waiting. */
       TE_FL_SCHEMA_COLLECTIVE = 1u << 2
};

/*
 * `rules` of an op say which of its arguments go together. The host compiles them at registration
 * and refuses a call that breaks one before any implementation sees it. A blank separates words, a
 * semicolon and a blank separate rules, and a rule is one of
 * - CONDITION requires CONDITION, after which "or" adds up to three more of which one suffices;
 * - CONDITION excludes CONDITION;
 * - NAME is WORD, or a comparison, which must hold in every call;
 * - NAME holds OTHER, or NAME holds COMMUNICATOR times OTHER: of two tensors, if both are given,
 * the first has as many elements as the other, or as many as that times the number of ranks.
 *
 * A CONDITION is one of
 * - NAME: the tensor, record or list is given, the bool is 1, or the number is not `neutral`;
 * - NAME is WORD|WORD: an enum has one of these values, or a tensor one of these dtypes or scaling
 *   modes;
 * - a comparison: NAME, one of < <= > >= == != multiple_of, and a NAME or a number.
 */

typedef struct te_fl_op_schema {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_op_schema));
  uint32_t flags TE_FL_INIT(0);
  uint32_t args_size TE_FL_INIT(0);       /* sizeof the argument struct */
  uint32_t least_args_size TE_FL_INIT(0); /* smallest struct_size accepted: the first form's */
  uint32_t arg_count TE_FL_INIT(0);
  uint32_t reserved TE_FL_INIT(0);
  const te_fl_arg_desc* const* args TE_FL_INIT(NULL);
  const char* name TE_FL_INIT(NULL);
  const char* summary TE_FL_INIT(NULL);
  const char* formula TE_FL_INIT(NULL);
  const char* source TE_FL_INIT(NULL);
  const char* rules TE_FL_INIT(NULL); /* NULL: none */
  /* The op that is its backward, then blank-separated "THEIRS=OURS" (or a name alone if they are
     equal): which argument of it gets which of this op's; "" and NULL: it has none. */
  const char* gradient TE_FL_INIT(NULL);
  /* Arithmetic operations of a call, a formula of the names in shape rules; NULL: a few for each
     element, so that a call costs what its bytes take. */
  const char* operations TE_FL_INIT(NULL);
} te_fl_op_schema;

/* ---- op implementations ---- */

typedef enum te_fl_kind {
  TE_FL_KIND_DEFAULT = 0,
  TE_FL_KIND_VENDOR = 1,
  TE_FL_KIND_REFERENCE = 2
} te_fl_kind;

#define TE_FL_PRIORITY_DEFAULT 150
#define TE_FL_PRIORITY_VENDOR 100
#define TE_FL_PRIORITY_REFERENCE 50

enum { /* te_fl_op_desc.flags */
       TE_FL_OP_THREAD_SAFE = 1u << 0,
       TE_FL_OP_GRAPH_SAFE = 1u << 1,
       /* Same inputs, same bits: always, or on calls with TE_FL_CALL_DETERMINISTIC. */
       TE_FL_OP_DETERMINISTIC = 1u << 2,
       /* Works where an output has the memory of an input, as the op's schema allows; without it
          such calls go to another implementation. */
       TE_FL_OP_IN_PLACE_OK = 1u << 3,
       TE_FL_OP_STATIC_SUPPORT = 1u << 4,
       /* For generic_gemm: GELU with pre_gelu_out, and pre_gelu_in with or without d_sum,
        * cost no more than the ops that they stand for, so that callers may ask for them
        * here; where D is quantised or of the pre-activation's dtype, that is plain, and
        * nothing is added to D. */
       TE_FL_OP_CHEAP_EPILOGUES = 1u << 5,
       TE_FL_OP_PLAN_MEMORY = 1u << 6 /* its plans own device memory (R26) */
};

typedef struct te_fl_op_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_op_desc));
  uint32_t reserved TE_FL_INIT(0);
  const char* op_name TE_FL_INIT(NULL);
  const char* impl_id TE_FL_INIT(NULL); /* R16 */
  uint32_t kind TE_FL_INIT(0);          /* te_fl_kind */
  int32_t priority TE_FL_INIT(0);       /* 0: the kind's default */
  uint32_t flags TE_FL_INIT(0);
  /* The architectures that it serves, from min_arch to max_arch, in the device's own numbering,
   * inclusively; 0: no bound. */
  uint32_t min_arch TE_FL_INIT(0);
  /* Masks in which every tensor argument's te_fl_dtype_index and te_fl_scaling must be. */
  uint64_t dtypes TE_FL_INIT(TE_FL_MASK_ANY_DTYPE);
  uint32_t scalings TE_FL_INIT(0x3f);
  uint32_t max_arch TE_FL_INIT(0);     /* see min_arch */
  uint64_t device_types TE_FL_INIT(0); /* bit i: DLPack device type i */
  void* self TE_FL_INIT(NULL);         /* passed to the functions below */
  te_fl_status (*run)(void* self, const te_fl_context* ctx, const void* args)
      TE_FL_INIT(NULL); /* required */
  te_fl_status (*supports)(void* self, const te_fl_context* ctx, const void* args) TE_FL_INIT(NULL);
  te_fl_status (*workspace)(void* self, const te_fl_context* ctx, const void* args, size_t* bytes)
      TE_FL_INIT(NULL);
  te_fl_status (*saved_bytes)(void* self, const te_fl_context* ctx, const void* args, size_t* bytes)
      TE_FL_INIT(NULL);
  /* Makes a plan for one full signature: dtypes, shapes, strides, alignment (up to 256 bytes),
     scaling modes, the parts present, which outputs begin where another argument does, all scalars,
     a saved record (of one that the op fills in the storage alone), device and context flags, and
     which addresses rng has; TE_FL_CALL_CAPTURING and _VALIDATE aside, so that a captured call
     finds the plan of the call that went before. Every call that has it gets the plan in ctx->plan,
     several at once, in workspace() and run(); so nothing else of the call may go into the plan: no
     address, stream, seed or offset. The host keeps a bounded number of plans. Those for a device
     that is withdrawn are destroyed after its plugin's quiesce() and before its destroy(). */
  te_fl_status (*prepare)(void* self, const te_fl_context* ctx, const void* args, void** plan)
      TE_FL_INIT(NULL);
  void (*destroy_plan)(void* self, void* plan)
      TE_FL_INIT(NULL);                           /* required if prepare is present */
  const te_fl_op_schema* schema TE_FL_INIT(NULL); /* custom ops (R17); NULL for the catalogue's */
  const char* vendor TE_FL_INIT(NULL);            /* NULL: the plugin's vendor */
  /* The provider whose kDLExtDev devices it serves (R18). NULL: those that its plugin
   * enumerates, which must be of one provider; the plugin is refused if they are of two. */
  const char* provider TE_FL_INIT(NULL);
  /* The later arguments of the op that it knows, by name, with blanks between them (R23). NULL:
     none. A custom op's own schema is meant as well. */
  const char* later_args TE_FL_INIT(NULL);
  uint64_t stream_state_bytes TE_FL_INIT(0); /* R27; 0: none */
  /* Writes a few words to `text`: which kernel, or which function of a library, run() would take
     for a call that supports() accepts, and why (R31). ctx has neither workspace nor plan. NULL:
     there is nothing to say beyond impl_id. */
  te_fl_status (*describe)(void* self, const te_fl_context* ctx, const void* args,
                           const te_fl_error_sink* text) TE_FL_INIT(NULL);
} te_fl_op_desc;

/* ---- devices ---- */

typedef struct te_fl_device_props {
  uint32_t struct_size;
  uint32_t arch;         /* provider's numbering, e.g. 90 for sm_90; 0 on the host */
  uint64_t total_memory; /* bytes */
  uint64_t free_memory;  /* bytes, now */
  uint32_t compute_units;
  uint32_t reserved;
  double copy_bandwidth; /* bytes/s read plus written, 0 until measured */
  char name[128];
  char driver[64]; /* version of what runs the chip, "CUDA 13.0"; empty if there is none to name */
} te_fl_device_props;

/* The kind of memory that is asked for. Every device has DEVICE; one that lacks another
 * kind, or cannot align as asked, answers UNSUPPORTED and says which. */
typedef enum te_fl_memory_kind {
  TE_FL_MEMORY_DEVICE = 0,
  TE_FL_MEMORY_PINNED = 1,  /* host memory that copies to and from the device need not wait for */
  TE_FL_MEMORY_MANAGED = 2, /* one address for the host and the device */
  TE_FL_MEMORY_PEER = 3, /* the device's, and its provider's other devices may read and write it */
  TE_FL_MEMORY_KIND_COUNT = 4
} te_fl_memory_kind;

typedef struct te_fl_memory_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_memory_desc));
  uint32_t kind TE_FL_INIT(TE_FL_MEMORY_DEVICE); /* te_fl_memory_kind */
  uint64_t bytes TE_FL_INIT(0);
  uint64_t alignment TE_FL_INIT(256); /* a power of two, at least 256: the host sees to it */
  uint32_t flags TE_FL_INIT(0);       /* none is defined yet: 0 */
  uint32_t reserved TE_FL_INIT(0);
  void* stream TE_FL_INIT(NULL); /* of DEVICE, MANAGED and PEER memory: it is for use there */
} te_fl_memory_desc;

enum {                             /* flags of create_event */
       TE_FL_EVENT_TIMED = 1u << 0 /* elapsed_time() will be asked of it */
};

/* Functions of one device. `self` is te_fl_device_desc.self. Streams are opaque; NULL is the
   default stream. All may be called from any thread. Memory is stream-ordered: allocate() gives it
   for use on `stream`, and work that was enqueued there before free() may still use it. */
typedef struct te_fl_device_api {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_device_api));
  uint32_t reserved TE_FL_INIT(0);
  te_fl_status (*allocate)(void* self, const te_fl_memory_desc* memory, void** out,
                           const te_fl_error_sink*) TE_FL_INIT(NULL); /* required */
  /* `kind` is that with which it was allocated, so that a device need not look for it. Required. */
  te_fl_status (*free)(void* self, void* data, uint32_t kind, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Copies between host and this device or within it; the direction follows from the flags: bit 0:
     dst is host memory, bit 1: src is host memory. Ordered on the stream. A source in host memory
     that is not pinned has been read when the function returns. */
  te_fl_status (*copy)(void* self, void* dst, const void* src, size_t bytes, uint32_t host_flags,
                       void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL); /* required */
  te_fl_status (*fill)(void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                       const te_fl_error_sink*) TE_FL_INIT(NULL); /* required */
  te_fl_status (*create_stream)(void* self, void** stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*destroy_stream)(void* self, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Waits for the stream. An error may be that of any op enqueued before; INVALID_ARGUMENT is a
     mistake in the values of one (R12), after which the device goes on. Required. */
  te_fl_status (*synchronize)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*create_event)(void* self, uint32_t flags, void** event, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*destroy_event)(void* self, void* event, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*record_event)(void* self, void* event, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* The stream waits, not the host. The event may be one of another device whose table has this
     very function (R24). */
  te_fl_status (*wait_event)(void* self, void* event, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*synchronize_event)(void* self, void* event, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Asked before every op. INVALID_ARGUMENT from both this and check_stream: the stream is not one
     of the device, and the op is refused before anything is allocated or enqueued on it.
     UNSUPPORTED: the device has no captures. Any other failure is the op's, which is not run. */
  te_fl_status (*is_capturing)(void* self, void* stream, int32_t* capturing,
                               const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* `props->struct_size` is the host's: nothing is written behind it (R3). Required. */
  te_fl_status (*properties)(void* self, te_fl_device_props* props, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Graphs (R19). All five, is_capturing included, or the device cannot capture. Between
     begin_capture and end_capture, work that is enqueued on `stream` is recorded and not run; the
     calls come from one thread, and other threads' work on other streams goes on. The default
     stream (NULL) is not captured. end_capture ends the capture whatever its status. A graph is
     launched any number of times, each after the one before it has been enqueued. destroy_graph may
     be called while a launch is still running; the device then finishes it first. */
  te_fl_status (*begin_capture)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*end_capture)(void* self, void* stream, void** graph, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*launch_graph)(void* self, void* graph, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*destroy_graph)(void* self, void* graph, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Asked under TE_FL_VALIDATE=1, check_stream also if is_capturing refuses the stream, and
     check_pointer of the first blocks of an allocator (R25). Each answers OK, or INVALID_ARGUMENT
     with a text that says what the argument is instead ("it is pageable host memory").
     check_pointer: may kernels of this device read and write these bytes? check_stream: is it its
     stream? */
  te_fl_status (*check_pointer)(void* self, const void* data, size_t bytes, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*check_stream)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Copies bytes of another device, `src`, whose te_fl_device_desc.self is `src_self`, to this one.
     Called only where both devices' tables have this very function. Ordered on both streams: it
     comes after what was enqueued on either before and before what is enqueued on either later.
     UNSUPPORTED: it cannot for these two, and the host goes by its own memory, as it does where
     this is NULL. Neither stream is being captured. */
  te_fl_status (*copy_between)(void* self, void* dst, void* dst_stream, void* src_self,
                               const void* src, void* src_stream, size_t bytes,
                               const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* A stream that create_stream did not make is about to be destroyed by its owner (R22): what is
     kept for it, such as freed memory for its next allocation, goes. Work may be running on it. */
  te_fl_status (*retire_stream)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Sets `done` to 1 if what the event marks is done, or if it marks nothing yet; never waits. */
  te_fl_status (*query_event)(void* self, void* event, int32_t* done, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Nanoseconds from one mark to the other, of two events that were created with
     TE_FL_EVENT_TIMED and are done; the host sees to both. 0 if `end` came first. */
  te_fl_status (*elapsed_time)(void* self, void* start, void* end, uint64_t* nanoseconds,
                               const te_fl_error_sink*) TE_FL_INIT(NULL);
} te_fl_device_api;

/* A source of a device's memory that a program installs (R25); not a plugin's to provide. */
typedef struct te_fl_allocator {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_allocator));
  uint32_t reserved TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL); /* for messages, "torch"; copied; required */
  void* self TE_FL_INIT(NULL);       /* passed to the functions below */
  /* Memory of kind DEVICE for use on memory->stream. OUT_OF_MEMORY: it has none and can get none;
     the host then asks for trim() and once more. Required. */
  te_fl_status (*allocate)(void* self, const te_fl_memory_desc* memory, void** out,
                           const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Work that has been enqueued on the stream of the allocation, or on one that record_stream
     named, may still use the memory. Required. */
  te_fl_status (*free)(void* self, void* data, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Work on `stream` uses the memory, which was allocated for another stream, until free().
     Required. */
  te_fl_status (*record_stream)(void* self, void* data, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Gives back to the device what it keeps and nobody uses, `bytes` at least if it can, so that
     somebody else may allocate them. NULL: it keeps nothing. */
  te_fl_status (*trim)(void* self, uint64_t bytes, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* A stream of the device is about to go (R22), one that te-fl made as well as another: what is
     kept for it goes. NULL: it keeps nothing by stream. */
  te_fl_status (*retire_stream)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Called once, when another allocator or none has taken its place, or the device has gone, and
     the last of its memory has been freed. NULL: nothing is to be done. */
  void (*destroy)(void* self) TE_FL_INIT(NULL);
} te_fl_allocator;

typedef struct te_fl_device_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_device_desc));
  uint32_t reserved TE_FL_INIT(0);
  te_fl_device device TE_FL_INIT({});    /* DLPack type and index */
  const char* provider TE_FL_INIT(NULL); /* e.g. "cuda"; required for kDLExtDev */
  void* self TE_FL_INIT(NULL);
  const te_fl_device_api* api TE_FL_INIT(NULL);
} te_fl_device_desc;

/* ---- providers of collectives ---- */

/* The ranks of one communicator tell each other by this, while it is made, where they are: a store
   of values by key, the host's. Valid during create() and split(), and as long as the communicator
   lives. Any thread; keys are the provider's own, and nobody else's communicator sees them. */
typedef struct te_fl_comm_store {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_store));
  uint32_t reserved TE_FL_INIT(0);
  void* host TE_FL_INIT(NULL);
  /* Sets a key, once. */
  te_fl_status (*set)(void* host, const char* key, const void* value, size_t bytes,
                      const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Waits until some rank has set the key; TIMEOUT after timeout_ms. Writes the value's size to
     `bytes`, and the value, if `capacity` is no less than that; INVALID_ARGUMENT if it is. */
  te_fl_status (*get)(void* host, const char* key, uint32_t timeout_ms, void* value,
                      size_t capacity, size_t* bytes, const te_fl_error_sink*) TE_FL_INIT(NULL);
} te_fl_comm_store;

/* A communicator that is to be made. Valid during the call alone, but for `store`. */
typedef struct te_fl_comm_config {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_config));
  uint32_t device_provider TE_FL_INIT(0); /* as te_fl_tensor.provider */
  te_fl_device device TE_FL_INIT({});     /* the one that this rank's ops are to run on */
  int32_t rank TE_FL_INIT(0);
  int32_t size TE_FL_INIT(1);
  const char* name TE_FL_INIT(NULL); /* for messages, "world" */
  /* The bytes that unique_id() gave on rank 0; of a provider without it NULL and 0. */
  const void* id TE_FL_INIT(NULL);
  size_t id_bytes TE_FL_INIT(0);
  const te_fl_comm_store* store TE_FL_INIT(NULL); /* never NULL */
  uint32_t timeout_ms TE_FL_INIT(0);              /* see R33; 0: wait for ever */
  uint32_t flags TE_FL_INIT(0);                   /* none is defined yet: 0 */
} te_fl_comm_config;

/* Functions of a provider; `self` is te_fl_comm_desc.self, `comm` what create() or split() gave. */
typedef struct te_fl_comm_api {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_api));
  uint32_t reserved TE_FL_INIT(0);
  /* On rank 0 before create(): the bytes, of any number, by which the ranks find each other; the
     host hands them to all. Called with capacity 0 for the number alone. NULL: create() needs none.
   */
  te_fl_status (*unique_id)(void* self, void* id, size_t capacity, size_t* bytes,
                            const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Called on every rank. Required. */
  te_fl_status (*create)(void* self, const te_fl_comm_config* config, void** comm,
                         const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Sets `done` to 1 once the communicator can be used; a failure to make it is the status. Never
     waits. NULL: create() and split() return when it can be. */
  te_fl_status (*ready)(void* comm, int32_t* done, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Every rank of `comm` calls it; those with one config->name become one communicator, with the
     ranks and size that the config says. NULL: the host makes it by create(). */
  te_fl_status (*split)(void* comm, const te_fl_comm_config* config, int32_t color, void** out,
                        const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* No op of it runs on the host; those enqueued on a device may be running, which is waited for
     unless it was aborted. Called by this rank alone: it waits for no other. Required. */
  void (*destroy)(void* comm) TE_FL_INIT(NULL);
  /* See R32. May be called several times. Required. */
  void (*abort)(void* comm) TE_FL_INIT(NULL);
  /* OK, or the failure that the communicator met outside of a call: COMM_FAILED. Asked again and
     again; never waits. NULL: there is nothing that calls do not say. */
  te_fl_status (*async_error)(void* comm, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Both or neither (R33). group_end()'s status is that of the ops between. */
  te_fl_status (*group_start)(void* self, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*group_end)(void* self, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Version of the library behind it, that ranks compare ("2.28.9"); NULL: the plugin's version
     says all. Valid until destroy() of the plugin. */
  const char* (*version)(void* self)TE_FL_INIT(NULL);
} te_fl_comm_api;

enum { /* te_fl_comm_desc.flags */
       /* Its ops may be captured into graphs, where their implementations say so. */
       TE_FL_COMM_CAPTURABLE = 1u << 0,
       /* Ranks may be threads of one process, and only that: processes never meet. */
       TE_FL_COMM_THREADS_ONLY = 1u << 1
};

/* A provider of communicators. Its plugin implements ops of class collective for them. */
typedef struct te_fl_comm_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_desc));
  uint32_t flags TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL);   /* "nccl"; [a-z0-9_]+, unique in a process; required */
  uint32_t kind TE_FL_INIT(0);         /* te_fl_kind, by which policy chooses among providers */
  int32_t priority TE_FL_INIT(0);      /* 0: the kind's default */
  uint64_t device_types TE_FL_INIT(0); /* bit i: DLPack device type i, of tensors in its ops */
  void* self TE_FL_INIT(NULL);
  const te_fl_comm_api* api TE_FL_INIT(NULL); /* required */
} te_fl_comm_desc;

/* ---- host and plugin ---- */

typedef enum te_fl_log_level {
  TE_FL_LOG_TRACE = 0,
  TE_FL_LOG_DEBUG = 1,
  TE_FL_LOG_INFO = 2,
  TE_FL_LOG_WARNING = 3,
  TE_FL_LOG_ERROR = 4
} te_fl_log_level;

/* The facts that the host tells before a plugin decides how to answer. Valid during the
 * query only. */
typedef struct te_fl_host_info {
  uint32_t struct_size;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t reserved;
  const char* version; /* te-fl's version, "0.1.0" */
} te_fl_host_info;

/* The host's services that a plugin may call. Valid from create() until destroy()
 * returns; any thread. */
typedef struct te_fl_host_api {
  uint32_t struct_size;
  uint32_t reserved;
  void* host;
  void (*log)(void* host, int32_t level, const char* text);
  /* Value of a TE_FL_* setting by name, set by the environment or by the program and checked
     against its type (a bool is "0" or "1"); of one that the plugin declared (R21) its default if
     it is unset. NULL: unset, without a default. Valid until destroy(). */
  const char* (*setting)(void* host, const char* name);
  /* Memory of any device, the host included, as its te_fl_device_api.allocate describes it (R28).
     `provider` is that of te_fl_context, 0 unless the device is kDLExtDev. */
  te_fl_status (*allocate)(void* host, te_fl_device device, uint32_t provider,
                           const te_fl_memory_desc* memory, void** out, const te_fl_error_sink*);
  void (*free)(void* host, te_fl_device device, uint32_t provider, void* data, uint32_t kind,
               void* stream);
  /* The meaning of a scaling mode (R30); NULL for a number that the host does not know
   * and for NONE. Valid for ever. */
  const te_fl_scaling_desc* (*scaling)(void* host, uint32_t scaling);
} te_fl_host_api;

/* A plugin's findings about its surroundings: a driver, a library that it opens, a chip. */
typedef enum te_fl_finding_level {
  TE_FL_FINDING_OK = 0,
  TE_FL_FINDING_NOTE = 1,   /* something is missing that not everybody needs */
  TE_FL_FINDING_PROBLEM = 2 /* the plugin does not do what it was installed for */
} te_fl_finding_level;

typedef struct te_fl_finding {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_finding));
  int32_t level TE_FL_INIT(0);           /* te_fl_finding_level */
  const char* subject TE_FL_INIT(NULL);  /* "driver", "libacmeblas" */
  const char* state TE_FL_INIT(NULL);    /* version and path, or what is wrong */
  const char* disables TE_FL_INIT(NULL); /* features that do not work because of it; NULL: none */
  const char* remedy TE_FL_INIT(NULL);   /* a package to install, a setting to change; NULL: none */
} te_fl_finding;

typedef struct te_fl_finding_sink {
  uint32_t struct_size;
  uint32_t reserved;
  void* host;
  void (*write)(void* host, const te_fl_finding* finding); /* required; copies what it is given */
} te_fl_finding_sink;

typedef struct te_fl_plugin_api {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_plugin_api));
  uint32_t reserved TE_FL_INIT(0);
  /* Makes the instance. A failure leaves nothing behind: no thread, no device memory. Required. */
  te_fl_status (*create)(const te_fl_host_api* host, void** instance,
                         const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  /* Arrays of pointers to descriptors, valid until destroy() (R7). NULL slot: none. */
  te_fl_status (*devices)(void* instance, uint32_t* count, const te_fl_device_desc* const** list,
                          const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  te_fl_status (*ops)(void* instance, uint32_t* count, const te_fl_op_desc* const** list,
                      const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  te_fl_status (*quiesce)(void* instance, const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  void (*destroy)(void* instance) TE_FL_INIT(NULL); /* required */
  /* Says what it found and what it misses, one finding each, for `te-fl info` and `te-fl doctor`.
     May open libraries and ask drivers; never called on the way of an op. */
  te_fl_status (*diagnose)(void* instance, const te_fl_finding_sink* findings,
                           const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  /* Providers of collectives (R29), listed as devices() and ops() are. */
  te_fl_status (*comms)(void* instance, uint32_t* count, const te_fl_comm_desc* const** list,
                        const te_fl_error_sink* errors) TE_FL_INIT(NULL);
} te_fl_plugin_api;

/* The types of a setting (R21). */
typedef enum te_fl_setting_type {
  TE_FL_SETTING_STRING = 0,
  TE_FL_SETTING_BOOL = 1, /* handed out as "0" or "1" */
  TE_FL_SETTING_INT = 2,
  TE_FL_SETTING_ENUM = 3,
  TE_FL_SETTING_LIST = 4, /* comma separated */
  /* Path of a file that decides what the plugin runs: part of the fingerprint by its contents, and
     ignored when the process runs with elevated privileges. */
  TE_FL_SETTING_FILE = 5
} te_fl_setting_type;

typedef struct te_fl_setting_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_setting_desc));
  uint32_t type TE_FL_INIT(0);                /* te_fl_setting_type */
  const char* name TE_FL_INIT(NULL);          /* "TE_FL_ACME_DEBUG" */
  const char* default_value TE_FL_INIT(NULL); /* as setting() hands it out; NULL: none */
  const char* choices TE_FL_INIT(NULL); /* ENUM: words with blanks between them; INT: "MIN MAX",
                                           or NULL: any; else NULL */
  const char* doc TE_FL_INIT(NULL);     /* a sentence for `te-fl env`; required */
} te_fl_setting_desc;

/* The first four members stay where they are in every major, so that versions can be told. */
typedef struct te_fl_plugin_header {
  uint32_t magic TE_FL_INIT(TE_FL_PLUGIN_MAGIC); /* TE_FL_PLUGIN_MAGIC */
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_plugin_header));
  uint32_t abi_major TE_FL_INIT(TE_FL_ABI_MAJOR);
  uint32_t abi_minor TE_FL_INIT(TE_FL_ABI_MINOR);
  uint32_t min_host_minor
      TE_FL_INIT(0);                   /* the oldest host minor that the plugin can do with (R2) */
  uint32_t features TE_FL_INIT(0);     /* facts a host must know or refuse (R2); none yet: 0 */
  const char* name TE_FL_INIT(NULL);   /* lower case, [a-z0-9_]+ */
  const char* vendor TE_FL_INIT(NULL); /* e.g. "nvidia"; "te-fl" for portable ones */
  const char* version TE_FL_INIT(NULL);
  const char* build_id
      TE_FL_INIT(NULL); /* changes with every build; NULL: the ELF build id is used */
  const te_fl_plugin_api* api TE_FL_INIT(NULL);
  const void* reserved[4] TE_FL_INIT({});
  const te_fl_setting_desc* const* settings TE_FL_INIT(NULL); /* R21; NULL: none */
  uint32_t setting_count TE_FL_INIT(0);
  uint32_t reserved2 TE_FL_INIT(0);
} te_fl_plugin_header;

/* The one exported symbol (R1). Returns NULL only if it cannot serve this host at all. */
typedef const te_fl_plugin_header* (*te_fl_plugin_query_fn)(const te_fl_host_info* host);
#define TE_FL_PLUGIN_QUERY_SYMBOL "te_fl_plugin_query"

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TE_FL_PLUGIN_H_ */
