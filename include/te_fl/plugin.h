/* clang-format off */
/*
 * te_fl/plugin.h - the te-fl plugin ABI. C99, self-contained.
 *
 * A plugin is a shared library that exports one function, te_fl_plugin_query. The function returns
 * the plugin's header: name, vendor, version, the ABI version that the plugin was built with, and a
 * table of functions. After create() these functions list the devices that the plugin provides and
 * the ops that it implements. "The host" below is te-fl, which loads the plugin. Loader messages,
 * tests and docs/abi-rules.md quote the rules by number.
 *
 *  R1  te_fl_plugin_query is the only exported symbol. It may be called several times and has no
 *      side effects: it touches no device, starts no thread and reads no file.
 *  R2  The major ABI versions of host and plugin must be equal. Before 2.0 minor versions are
 *      incompatible with each other: the minors must be equal, too. From 2.0 on the plugin's minor
 *      may be older or newer than the host's, because a minor only adds: members and slots at the
 *      end of structs and tables, flags, enumerators, ops, arguments of ops. The plugin's header
 *      then states in min_host_minor the oldest host minor that the plugin works with, which may be
 *      older than the header file that the plugin was built with, and in `features` the facts that
 *      a host must know or else refuse the plugin. struct_size shows which later additions a struct
 *      has (R3). ABI 1.0 was withdrawn: the host refuses a plugin built for it, and the plugin must
 *      be rebuilt.
 *  R3  Every struct that crosses the boundary begins with struct_size, which the writer of the
 *      struct sets to sizeof (te_fl_plugin_header has it second, after `magic`). A reader uses only
 *      members that lie inside struct_size. Members beyond it have their neutral value: zero,
 *      unless the member's comment says otherwise. A reader refuses a descriptor or table whose
 *      size is not a multiple of 8, since no struct has such a size. A function that fills in a
 *      struct provided by the other side (te_fl_device_props, te_fl_saved) writes only inside that
 *      struct's struct_size. Structs grow at the end only; reserved members are zero. Sizes are
 *      never compared by ==. Structs without struct_size (te_fl_dtype, te_fl_device,
 *      te_fl_dltensor) and the parameters of functions do not change within a major version.
 *  R4  In a table of functions a NULL slot means "absent". Slots marked "required" must not be
 *      NULL.
 *  R5  No exception crosses the boundary; every function that can fail returns te_fl_status. Error
 *      text goes to the error sink that the caller passed; a NULL sink means that the caller wants
 *      no text.
 *  R6  A status may carry the mark TE_FL_CLEAN: the call wrote nothing and enqueued nothing, so the
 *      host may try the next implementation. TE_FL_UNSUPPORTED is always clean. Any other error
 *      without the mark ends the op and is returned to its caller, whether it came from supports(),
 *      prepare(), workspace() or run(). Two errors end the op even with the mark:
 *      TE_FL_INVALID_ARGUMENT, which is the caller's mistake, and TE_FL_DEVICE_LOST from any
 *      function, after which no op runs on the device. The host treats a status with any other bit
 *      set, such as a negative number, as TE_FL_INTERNAL without the mark.
 *  R7  The plugin owns what it returns (headers, tables, descriptors, strings) and keeps it valid
 *      and unchanged from the call that returned it until destroy() returns. The header that
 *      te_fl_plugin_query returns must stay valid until the library is closed. The host owns what
 *      it passes and keeps it valid for the call only, except te_fl_host_api, which is valid until
 *      destroy() returns.
 *  R8  All state lives in the instance that create() returns. A plugin that changes the current
 *      device, the floating-point environment or signal handlers restores them before it returns.
 *  R9  Plugins log through te_fl_host_api.log only.
 *  R10 supports() and workspace() read metadata only: they never touch tensor data, never allocate,
 *      never block. The host does not call supports() of an implementation with
 *      TE_FL_OP_STATIC_SUPPORT, which states that the constraints in te_fl_op_desc decide alone,
 *      and does not repeat it for a call (same arguments, addresses and flags) that supports() has
 *      accepted. The refusals of supports(), workspace() and prepare() depend only on arguments,
 *      addresses and flags, the device's kind and the settings. They never depend on state that may
 *      differ between the ranks of a job, such as free memory, because all ranks must choose the
 *      same implementation.
 *  R11 run() enqueues on ctx->stream and returns; its status covers the enqueueing only. It reads
 *      nothing but its arguments, writes only into the outputs it was given, allocates no memory
 *      that outlives the call, and uses ctx->workspace (256-byte aligned) for scratch. Tensors are
 *      aligned to their element size. run() must not access memory beyond the end of a tensor.
 *  R12 The host checks arguments against the op's schema before run(): roles, dtypes, scaling
 *      modes, shapes, devices, scalar ranges, rules. An implementation checks only what the schema
 *      cannot express, such as values in memory. If such a check fails it answers
 *      TE_FL_INVALID_ARGUMENT | TE_FL_CLEAN, with a text that names argument, value and rule.
 *      An op need not wait for the device to check values in device memory (indices, positions).
 *      When an op meets an invalid value there, it writes NaN to the outputs that depend on it and
 *      stays inside its memory; the device's next synchronize() of that stream or
 *      synchronize_event() then returns TE_FL_INVALID_ARGUMENT, once, with a text that names the op
 *      too. A call with TE_FL_CALL_VALIDATE checks these values before it writes.
 *  R13 Any thread may call the plugin's functions. Several threads may be inside run() of one
 *      implementation at once. If the implementation does not set TE_FL_OP_THREAD_SAFE, the host
 *      serialises its run() instead. If two serialised implementations run each other's ops, a call
 *      that would deadlock returns TE_FL_BUSY.
 *  R14 create() has a time limit (TE_FL_PLUGIN_TIMEOUT_MS). The host abandons a plugin that exceeds
 *      it: the plugin is reported, its library stays mapped, and none of its functions is called
 *      again.
 *  R15 After quiesce() returns, no work of the plugin is running or enqueued. The host calls
 *      quiesce() when no thread is inside the plugin or inside another plugin's op on one of its
 *      devices, and from then on the host enqueues nothing. Until destroy(), threads that hold
 *      objects of a device may still copy from them, wait and free. The host calls destroy() when
 *      nothing that the plugin made is referenced any more.
 *  R16 impl_id is "<kind>.<name>", where <kind> is default, vendor or reference. It is lower case,
 *      may contain dots and underscores, and is unique per op. It stays the same between releases,
 *      because users write it into policies.
 *  R17 A custom op is named "vendor::op" and brings its own schema. The host refuses a schema that
 *      differs from the one already registered under the same name.
 *  R18 A DLPack device type has one provider in a process. A chip without a DLPack code uses
 *      kDLExtDev (12) with its provider name. A plugin that only adds ops enumerates no device. An
 *      implementation for kDLExtDev receives tensors of one provider only: the provider that its
 *      descriptor names or, without a name, the only provider of the devices that its plugin
 *      enumerates.
 *  R19 While a stream is captured, allocate() and free() on it work. Memory allocated during a
 *      capture belongs to the graph: it is reused only after it has been freed and the graph has
 *      been destroyed. Memory freed during a capture stays valid for the graph's launches. The host
 *      allocates the scratch of a captured op in this way, anew for every graph. run() with
 *      TE_FL_CALL_CAPTURING waits for nothing, reads no device memory from the host, and assumes
 *      that every launch uses the arguments of this call. The host does not call prepare() during a
 *      capture. It keeps a plan that was used in a capture until the plan's implementation is
 *      unregistered.
 *  R20 No side passes to an older one an addition that the older side would misread. The host gives
 *      a plugin no flag, enumerator, dtype or scaling mode that the plugin's minor lacks, unless it
 *      is correct to ignore it. The host ignores unknown flags of an op descriptor (such flags only
 *      ever add abilities) and treats an unknown status code as TE_FL_INTERNAL. If a plugin with a
 *      newer minor implements ops of the catalogue that the host does not know, the host leaves
 *      these ops out and reports them.
 *  R21 A plugin's settings are named TE_FL_<PLUGIN>_..., where <PLUGIN> is its name in capitals.
 *      The plugin declares them in its header; if its manifest has "settings", both must agree. The
 *      host checks values against the declaration before create(), and te_fl_host_api.setting
 *      returns them. The plugin itself reads no TE_FL_ variable from the environment.
 *  R22 A stream belongs to one device. Stream handles of two devices may be equal; the host never
 *      confuses the two streams. Any call may use, without notice, a stream that the plugin did not
 *      create, until retire_stream() names it. Afterwards the same handle may denote a new stream
 *      that is unrelated to the retired one.
 *  R23 An argument that was added to an op after the op's first form is marked TE_FL_ARG_LATER and
 *      has a neutral value. An implementation lists the later arguments that it knows in
 *      te_fl_op_desc.later_args; it may know a newer one and not an older one. The host skips the
 *      implementation for a call that sets a later argument missing from this list, and gives a
 *      reason that names the argument.
 *  R24 A stream may wait for an event of another device of the same provider, that is, of a device
 *      whose table has the very same wait_event function. The host passes no event of another
 *      provider.
 *  R25 A program, such as a framework, may install an allocator for a device (te_fl_allocator).
 *      From then on all memory of kind DEVICE that the host allocates there, for tensors, scratch
 *      and plugins, comes from the allocator. R19 and R22 apply to the allocator as they apply to
 *      the device's own functions. It returns memory that the device's kernels may read and write,
 *      aligned as requested, and in use nowhere else; the host refuses other memory with an error
 *      that names the allocator. Several threads may call its functions at once. Before any
 *      allocation of the device's memory fails, the host calls trim().
 *  R26 A plan may own device memory if its implementation sets TE_FL_OP_PLAN_MEMORY. The host then
 *      calls destroy_plan() only when the device has finished every call that used the plan, and
 *      every launch of a graph that captured such a call, on all streams. A program must not launch
 *      these graphs after it has unregistered the implementation. Any stream may use a plan as soon
 *      as prepare() has returned, so prepare() waits for the work that it enqueued. The host cannot
 *      wait for work on a stream that is being captured. Until the capture ends, it therefore
 *      destroys no plan that was used on that stream. Unregistering the plan's implementation,
 *      deactivating its plugin or removing its device fails meanwhile with BUSY and a reason, and
 *      changes nothing.
 *  R27 An implementation may need memory that is zero when its first op on a stream begins and then
 *      keeps what its ops leave there. It states the size in te_fl_op_desc.stream_state_bytes and
 *      finds the memory in ctx->stream_state. The memory belongs to one implementation, device and
 *      stream, whose ops run one after the other. The host frees the memory when the stream is
 *      destroyed or the implementation or the device is removed. A captured op has its own memory,
 *      which is zero each time a launch of the graph reaches the op. Work on the host has no
 *      stream, so an implementation for host memory cannot have stream state.
 *  R28 A plugin allocates device memory that it holds beyond a call by te_fl_host_api.allocate, so
 *      that a program's allocator (R25) and the count of live memory include it. The plugin frees
 *      it by the end of quiesce(), the memory of plans in destroy_plan(). Live memory keeps its
 *      device in the list, and keeps the plugin that provides the device loaded.
 *  R29 One provider of collectives (te_fl_comm_desc) makes a communicator (te_fl_communicator), and
 *      `maker` is the name of that provider's plugin. A call with a communicator goes only to
 *      implementations of that plugin, which read the communicator's `self`. The communicator
 *      belongs to the device of the calls that it is passed to. Its id is never reused in a
 *      process, so that state kept per communicator, such as a plan, never meets another
 *      communicator. A call with a communicator is not staged, verified or replayed, and has no
 *      fallback: if the first choice fails, the call fails, because the other ranks would not take
 *      part in anything else.
 *  R30 te_fl_scaling_desc defines a scaling mode. te_fl_host_api.scaling returns the description by
 *      number; users write the mode's name. A tensor's column-wise copy may have an amax of its own
 *      (te_fl_quant.columnwise_amax) only in a mode with a second level; ops then read and write
 *      the column-wise copy with that amax. An op that makes both copies from the same values
 *      writes the same amax to both.
 *  R31 describe() names the kernel or library function that run() would launch for the call, and
 *      says by which criterion run() chooses it. It reads metadata only, starts nothing and changes
 *      nothing. The host calls it for `te-fl explain` and traces, where tensors may have no memory.
 *  R32 All ranks of a communicator call the same ops with it in the same order, each rank from one
 *      thread at a time. An op on a device enqueues and returns, like any other op (R11); an op on
 *      the host returns when it is done. Any thread may call abort() while ops of the communicator
 *      run or wait in other threads: each of these ops soon ends with COMM_FAILED, as does every
 *      later one. An op that detects a failure itself, such as a peer that closed its connection,
 *      answers COMM_FAILED and names the rank that it waited for; the host then aborts the
 *      communicator. Last, the host calls destroy() on the failed communicator, which then waits
 *      for no rank.
 *  R33 te_fl_comm_api.create() and split() either wait for the other ranks, for at most the
 *      config's timeout_ms, or return before the other ranks have arrived; ready() then says when
 *      they have. One thread calls group_start() and group_end(). The ops of the provider's
 *      communicators between these two calls begin together, so that sends and receives of one
 *      group cannot deadlock by their order.
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

/* The ABI is defined for 64-bit little-endian machines. */
#define TE_FL_ABI_MAJOR 0u
#define TE_FL_ABI_MINOR 9u
#define TE_FL_PLUGIN_MAGIC 0x4c464554u /* "TEFL", little-endian */

/* ---- status ---- */

/* A te_fl_code, optionally or-ed with TE_FL_CLEAN (R6). */
typedef int32_t te_fl_status;

typedef enum te_fl_code {
  TE_FL_OK = 0,
  TE_FL_INVALID_ARGUMENT = 1, /* wrong arguments: the caller's mistake */
  TE_FL_UNSUPPORTED = 2,      /* this implementation cannot run the call; always clean */
  TE_FL_NOT_FOUND = 3,        /* unknown op, implementation, plugin, device or file */
  TE_FL_ALREADY_EXISTS = 4,   /* duplicate registration */
  TE_FL_OUT_OF_MEMORY = 5,
  TE_FL_FAILED_PRECONDITION = 6, /* a correct call at the wrong time */
  TE_FL_INCOMPATIBLE = 7,        /* version or ABI mismatch */
  TE_FL_BUSY = 8,                /* still in use; e.g. deactivation from inside an op */
  TE_FL_TIMEOUT = 9,
  TE_FL_DEVICE_LOST = 10, /* sticky device error; the device is retired */
  TE_FL_DATA_LOSS = 11,   /* truncated or corrupt input */
  TE_FL_INTERNAL = 12,    /* a bug, or an error that the plugin did not classify */
  /* another rank died, is late or called something else (R32); the communicator is aborted */
  TE_FL_COMM_FAILED = 13
} te_fl_code;

#define TE_FL_CLEAN 0x10000
#define TE_FL_STATUS_CODE(status) ((status)&0xffff)
#define TE_FL_STATUS_IS_CLEAN(status) \
  (((status)&TE_FL_CLEAN) != 0 || TE_FL_STATUS_CODE(status) == TE_FL_UNSUPPORTED)

/* The sink for error text. The host owns it and copies `text`. Texts of later calls are appended,
   one "caused by" line each. */
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
  uint16_t lanes; /* always 1 */
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

/* te-fl's own numbering of the dtypes it knows. A dtype mask has 64 bits; bit i is set if the mask
   contains the dtype with index i. */
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

enum { /* DLDeviceType: the values that te-fl names */
       TE_FL_DEVICE_CPU = 1,
       TE_FL_DEVICE_CUDA = 2,
       TE_FL_DEVICE_CUDA_HOST = 3, /* pinned memory: both the host and the device can access it */
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

/* Layout of the scale factors (scale_inv) of a row-wise copy. There is one factor for each block of
   the matrix [M, K]. The factors form a row-major array of rank 2 whose extents are rounded up by
   pad_rows and pad_cols. */
typedef enum te_fl_scale_layout {
  TE_FL_SCALE_LAYOUT_ROWS = 0,   /* [blocks along M, blocks along K] */
  TE_FL_SCALE_LAYOUT_COLUMNS = 1 /* [blocks along K, blocks along M] */
} te_fl_scale_layout;

/* Description of a scaling mode (R30). A quantised element is called a code; its value is code *
   scale factor. */
typedef struct te_fl_scaling_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_scaling_desc));
  uint32_t scaling TE_FL_INIT(0);    /* te_fl_scaling */
  const char* name TE_FL_INIT(NULL); /* "mxfp8" */
  uint64_t dtypes TE_FL_INIT(0);     /* mask of te_fl_dtype_index: dtypes that the codes may have */
  uint32_t scale_dtype TE_FL_INIT(0); /* te_fl_dtype_index of a scale factor */
  /* 1: the mode has a second level: factors are relative to one FP32 amax per tensor */
  uint32_t second_level TE_FL_INIT(0);
  /* Block of the row-wise copy whose elements share one factor. 0 and 0: one factor for the whole
     tensor. */
  uint32_t block_rows TE_FL_INIT(0);
  uint32_t block_cols TE_FL_INIT(0);
  uint32_t layout TE_FL_INIT(0); /* te_fl_scale_layout */
  /* the number of blocks along M is rounded up to a multiple of this */
  uint32_t pad_rows TE_FL_INIT(1);
  /* the number of blocks along K is rounded up to a multiple of this */
  uint32_t pad_cols TE_FL_INIT(1);
  /* 1: the column-wise copy is laid out as the row-wise copy of the transposed matrix, [K, M]. 0:
     it is [M, K] like the row-wise copy, with blocks of block_cols by block_rows, whose numbers are
     rounded up by pad_cols and pad_rows. */
  uint32_t transposed TE_FL_INIT(0);
} te_fl_scaling_desc;

enum { /* te_fl_quant.flags */
       /* For a tensor that the op writes: derive the scale from the data's amax (current scaling)
          and write it to `scale`, instead of reading `scale` (delayed scaling). Block modes always
          derive their scales. */
       TE_FL_QUANT_COMPUTE_SCALE = 1u << 0,
       TE_FL_QUANT_POW2_SCALE = 1u << 1 /* truncate derived scales to powers of two */
};

/* clang-format off */
/*
 * The quantised part of a tensor. For a logical tensor seen as a matrix [M, K] (K = last dimension,
 * M = product of the others):
 *   row-wise data: te_fl_tensor.dl.data, [M, K], may be NULL if only the column-wise copy exists.
 *     Compact, except in arguments that may have strides (TE_FL_ARG_STRIDED_CODES).
 *   column-wise data: compact [K, M] (MXFP8: [M, K], not transposed).
 *   scale_inv, by scaling mode:
 *     TENSOR         FP32 [1], for row-wise and column-wise data; columnwise_scale_inv is NULL or
 *                    equal to scale_inv
 *     BLOCK_1X128    row-wise FP32 [ceil(K/128), roundup(M,4)]; column-wise
 *                    [ceil(M/128), roundup(K,4)]
 *     BLOCK_128X128  row-wise FP32 [ceil(M/128), roundup(ceil(K/128),4)]; column-wise
 *                    [ceil(K/128), roundup(ceil(M/128),4)]
 *     MXFP8          E8M0 [roundup(M,128), roundup(ceil(K/32),4)]; column-wise
 *                    [roundup(ceil(M/32),4), roundup(K,128)]
 *     NVFP4          E4M3 [roundup(M,128), roundup(ceil(K/16),4)]; column-wise: the same for [K, M]
 *   amax: FP32 [1]. As an output with a given scale (delayed scaling) it is a running maximum:
 *     amax = max(amax, amax of the data). With COMPUTE_SCALE it is set to the amax of the data.
 *     Optional when the scale is given.
 *   columnwise_amax: FP32 [1], only in modes with a second level: the amax of the column-wise copy
 *     alone (R30). NULL: `amax` applies to row-wise and column-wise data.
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
  /* id of the device's provider, assigned by the host; 0 unless the device is kDLExtDev */
  uint32_t provider TE_FL_INIT(0);
  te_fl_dltensor dl;
  const te_fl_quant* quant TE_FL_INIT(NULL); /* NULL: not quantised */
} te_fl_tensor;

/* State that a forward op saves for its backward op in a format of its own, in addition to the
   tensors that the op's schema lists. The caller provides the struct and, if the implementation's
   saved_bytes() asks for storage, the storage. */
typedef struct te_fl_saved {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_saved));
  /* 1, set by the forward: only a backward of the same implementation can read the record */
  uint32_t opaque TE_FL_INIT(0);
  const char* producer TE_FL_INIT(NULL); /* impl_id of the forward, interned; set by the host */
  const te_fl_tensor* storage TE_FL_INIT(NULL); /* U8 [bytes] on the op's device, or NULL */
} te_fl_saved;

/* Argument of a collective op: the processes (ranks) that call the op together (R29). The host
   makes this struct from the result of te_fl_comm_api.create() or split(). */
typedef struct te_fl_communicator {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_communicator));
  uint32_t device_provider TE_FL_INIT(0); /* as te_fl_tensor.provider */
  te_fl_device device TE_FL_INIT({});
  int32_t rank TE_FL_INIT(0);         /* from 0 to size - 1 */
  int32_t size TE_FL_INIT(1);         /* the number of processes, at least 1 */
  uint64_t id TE_FL_INIT(0);          /* never 0, never reused */
  const char* maker TE_FL_INIT(NULL); /* name of the plugin that made it */
  void* self TE_FL_INIT(NULL);        /* state of the provider */
} te_fl_communicator;

/* ---- the call context ---- */

/* A chain of optional additions to a context. No type is defined yet. A reader skips a type that it
   does not know. */
typedef struct te_fl_extension {
  uint32_t struct_size;
  uint32_t type;
  const struct te_fl_extension* next;
} te_fl_extension;

/* State of the counter-based random number generator (Philox 4x32-10). An address that is not NULL
   points to one uint64 in the device's memory, which the op reads when it runs: the seed at
   seed_address replaces `seed`, and the offset at offset_address is added to `offset`. Either
   address may be set without the other. They let a captured graph draw new numbers at every launch:
   the graph fixes the members, but not the memory at the addresses. */
typedef struct te_fl_rng {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_rng));
  uint32_t reserved TE_FL_INIT(0);
  uint64_t seed TE_FL_INIT(0);
  uint64_t offset TE_FL_INIT(0); /* in Philox counters; each counter yields four 32-bit words */
  const uint64_t* seed_address TE_FL_INIT(NULL);
  const uint64_t* offset_address TE_FL_INIT(NULL);
} te_fl_rng;

enum { /* te_fl_context.flags */
       /* the same inputs must give the same bits; otherwise refuse the call */
       TE_FL_CALL_DETERMINISTIC = 1u << 0,
       TE_FL_CALL_CAPTURING = 1u << 1, /* the stream is being captured into a graph */
       /* Set by TE_FL_VALIDATE=1, except during captures: make also the checks that must wait for
          the device (R12). */
       TE_FL_CALL_VALIDATE = 1u << 2
};

typedef struct te_fl_context {
  uint32_t struct_size;
  uint32_t flags;
  te_fl_device device;
  uint32_t provider;
  uint32_t reserved;
  void* stream; /* borrowed; NULL is the device's default stream */
  /* scratch of the size that workspace() returned, 256-byte aligned; NULL for size 0 */
  void* workspace;
  size_t workspace_bytes;
  void* plan;                     /* plan that prepare() made for this signature, or NULL */
  const te_fl_rng* rng;           /* never NULL for ops with TE_FL_SCHEMA_USES_RNG */
  const te_fl_error_sink* errors; /* NULL: no text wanted */
  const te_fl_extension* extensions;
  void* stream_state; /* stream_state_bytes of memory, 256-byte aligned (R27); NULL if that is 0 */
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
       TE_FL_ARG_HOST = 1u << 1,       /* in host memory, whatever device the op runs on */
       TE_FL_ARG_ANY_MEMORY = 1u << 2, /* in host or device memory */
       /* a tensor of FP8 codes without quantisation data (te_fl_tensor.quant is NULL) */
       TE_FL_ARG_RAW_FP8 = 1u << 3,
       /* only the memory that te_fl_quant points to is used; dl.data may be NULL */
       TE_FL_ARG_QUANT_ONLY = 1u << 4,
       /* the dtype must equal the dtype of the argument `same_as` */
       TE_FL_ARG_SAME_DTYPE = 1u << 5,
       /* strides may make elements overlap, as in a broadcast input */
       TE_FL_ARG_ALLOW_OVERLAP = 1u << 6,
       TE_FL_ARG_OPAQUE = 1u << 7, /* checkers do not compare or poison the contents */
       /* A tensor with TENSOR scaling and no column-wise copy may have strides. */
       TE_FL_ARG_STRIDED_CODES = 1u << 8,
       /* added after the op's first form (R23); placed after all other arguments */
       TE_FL_ARG_LATER = 1u << 9
};

/*
 * Description of one argument of an op. `shape` is a rule that the host compiles at registration:
 *   rule    = "any" | dims | test " ? " dims " : " (dims, or another test ...)
 *   dims    = "" (scalar, rank 0) or terms separated by spaces;  test = BOOL | ENUM " is " VALUE
 *   term    = "..." (leading dimensions, the same for all arguments; first term only)
 *           | "@..." (their product) | "@.../INT" (divided, rounded up) | "#LIST" (its length)
 *           | INT | "_" (any size) | NAME | INT*NAME | NAME+INT | ?NAME (1 or the value of NAME)
 * A NAME is bound by the first argument that mentions it and must agree afterwards. For tensor
 * lists the rule applies element by element, with names bound afresh for each index; names that
 * plain tensors bind hold for every element.
 * `min` and `max` are inclusive bounds of a scalar, or of each integer in a list; both 0: no
 * bounds. `neutral` is the value at which the argument has no effect (for a tensor: NULL). An
 * implementation that does not know a later argument (R23) is used only for calls in which that
 * argument is neutral.
 */
typedef struct te_fl_arg_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_arg_desc));
  uint8_t type TE_FL_INIT(0); /* te_fl_arg_type */
  uint8_t role TE_FL_INIT(0); /* te_fl_arg_role; scalars are IN */
  uint16_t reserved TE_FL_INIT(0);
  uint32_t flags TE_FL_INIT(0);
  uint32_t offset TE_FL_INIT(0);       /* of the argument's member in the argument struct */
  uint32_t count_offset TE_FL_INIT(0); /* of the member that has a list's count (int64_t) */
  uint64_t dtypes TE_FL_INIT(0);       /* mask of te_fl_dtype_index */
  uint32_t scalings TE_FL_INIT(
      TE_FL_BIT(TE_FL_SCALING_NONE)); /* mask of te_fl_scaling; bit 0: may be unquantised */
  uint32_t reserved2 TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL);
  const char* shape TE_FL_INIT(NULL);
  /* Name of another argument, or NULL. For role INOUT: a bool or an F32; the op reads this argument
     only if the bool is 1 or the F32 is not 0 (NULL: always). For role OUT: an optional tensor (a
     no-op flag); if it is given, the op may leave this output unchanged. */
  const char* inout_if TE_FL_INIT(NULL);
  /* names of inputs that this output may share memory with, separated by spaces */
  const char* aliases TE_FL_INIT(NULL);
  /* Name of an argument, or NULL. With TE_FL_ARG_SAME_DTYPE: its dtype is required. Without, for an
     output: its dtype is the default of callers that derive outputs from the inputs. */
  const char* same_as TE_FL_INIT(NULL);
  const char* enum_names TE_FL_INIT(NULL); /* names of the values 0, 1, ..., separated by spaces */
  double neutral TE_FL_INIT(0);
  double min TE_FL_INIT(0);
  double max TE_FL_INIT(0);
  /* For an output whose shape rule does not fix its extents: a formula in terms of the inputs, for
     documentation and tools. NULL: the shape rule fixes them. */
  const char* extents TE_FL_INIT(NULL);
} te_fl_arg_desc;

enum { /* te_fl_op_schema.flags */
       TE_FL_SCHEMA_USES_RNG = 1u << 0,
       /* The op's class is ENQUIRY, COLLECTIVE or, without these flags, compute. An enquiry reads
          metadata, writes results in host memory and touches no device data. */
       TE_FL_SCHEMA_ENQUIRY = 1u << 1,
       /* All ranks of a communicator call the op. It is never staged and never verified by a second
          run. It has no fallback: if the first choice fails, the call fails, because a fallback on
          one rank alone would leave the other ranks waiting. */
       TE_FL_SCHEMA_COLLECTIVE = 1u << 2
};

/*
 * te_fl_op_schema.rules states which combinations of arguments a call may have. The host compiles
 * the rules at registration and refuses a call that breaks one before any implementation sees the
 * call. Words are separated by a space, rules by a semicolon and a space. A rule is one of
 * - CONDITION requires CONDITION; "or CONDITION" may follow up to three times, and then one of the
 *   required conditions suffices;
 * - CONDITION excludes CONDITION;
 * - CONDITION or CONDITION, with up to five conditions: one of them must hold in every call;
 * - a CONDITION other than NAME alone: must hold in every call.
 * An explanation in parentheses may follow a rule; messages quote it with the rule.
 *
 * A CONDITION is one of
 * - NAME: the tensor, record or list is given, the bool is 1, or the number is not `neutral`;
 * - NAME is WORD|WORD: an enum has one of these values, or a tensor one of these dtypes or scaling
 *   modes;
 * - a comparison: two sums of products, as "2 * R - 1", with one of < <= > >= == != multiple_of
 *   between them. A factor is an integer, the NAME of an integer argument, a name that a shape rule
 *   of a plain tensor binds, or sum(NAME) of a list of integers. Instead of a sum, a side may be
 * one real number or the NAME of one. A rule with a name that no given tensor binds is not checked;
 * - a comparison of the NAMEs of two lists of integers, of equal lengths: element by element;
 * - NAME holds OTHER: if both are given, tensor NAME has as many elements as tensor OTHER, or as
 *   all tensors of list OTHER, or OTHER elements if that is an integer;
 * - NAME holds COMMUNICATOR times OTHER: likewise, but NAME has as many elements as OTHER times the
 *   number of ranks;
 * - NAME fits OTHER: if tensor OTHER has integers or bools, number NAME, rounded towards zero, is
 *   in their range.
 */

typedef struct te_fl_op_schema {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_op_schema));
  uint32_t flags TE_FL_INIT(0);
  uint32_t args_size TE_FL_INIT(0); /* sizeof the argument struct */
  /* smallest struct_size that is accepted: the size of the op's first form */
  uint32_t least_args_size TE_FL_INIT(0);
  uint32_t arg_count TE_FL_INIT(0);
  uint32_t reserved TE_FL_INIT(0);
  const te_fl_arg_desc* const* args TE_FL_INIT(NULL);
  const char* name TE_FL_INIT(NULL);
  const char* summary TE_FL_INIT(NULL);
  const char* formula TE_FL_INIT(NULL);
  const char* source TE_FL_INIT(NULL);
  const char* rules TE_FL_INIT(NULL); /* NULL: none */
  /* The name of the op's backward op, followed by space-separated pairs "THEIRS=OURS": argument
     THEIRS of the backward receives argument OURS of this op. A name alone stands for NAME=NAME.
     "THEIRS=d(OURS)": the gradient of output OURS, which the backward reads, or of input OURS,
     which it writes. "" or NULL: the op has no backward. */
  const char* gradient TE_FL_INIT(NULL);
  /* Number of arithmetic operations of a call, as a formula of the names in the shape rules. NULL:
     a few operations per element, so that memory bandwidth determines the cost of a call. */
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
       /* Equal inputs give bitwise equal results: in every call, or at least in calls with
          TE_FL_CALL_DETERMINISTIC. */
       TE_FL_OP_DETERMINISTIC = 1u << 2,
       /* The implementation also works in place, where the op's schema allows an output to share
          memory with an input. Without this flag such calls go to another implementation. */
       TE_FL_OP_IN_PLACE_OK = 1u << 3,
       TE_FL_OP_STATIC_SUPPORT = 1u << 4,
       /* For generic_gemm: two epilogues cost no more here than the separate ops that they replace,
          namely GELU with pre_gelu_out, and pre_gelu_in with or without d_sum. This holds if the
          pre-activation is not quantised, D is quantised or has the pre-activation's dtype, and
          nothing is added to D. Callers may then use these epilogues. */
       TE_FL_OP_CHEAP_EPILOGUES = 1u << 5,
       TE_FL_OP_PLAN_MEMORY = 1u << 6 /* plans of this implementation own device memory (R26) */
};

typedef struct te_fl_op_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_op_desc));
  uint32_t reserved TE_FL_INIT(0);
  const char* op_name TE_FL_INIT(NULL);
  const char* impl_id TE_FL_INIT(NULL); /* "<kind>.<name>" (R16) */
  uint32_t kind TE_FL_INIT(0);          /* te_fl_kind */
  int32_t priority TE_FL_INIT(0);       /* 0: the default priority of the kind */
  uint32_t flags TE_FL_INIT(0);
  /* The range of architectures that the implementation supports, from min_arch to max_arch, in
     the device provider's own numbering. 0: no bound. */
  uint32_t min_arch TE_FL_INIT(0);
  /* Masks of te_fl_dtype_index and te_fl_scaling. The implementation supports a call only if the
     masks contain the dtype and the scaling mode of every tensor argument. */
  uint64_t dtypes TE_FL_INIT(TE_FL_MASK_ANY_DTYPE);
  uint32_t scalings TE_FL_INIT(0x3f);
  uint32_t max_arch TE_FL_INIT(0);     /* upper bound of the range; see min_arch */
  uint64_t device_types TE_FL_INIT(0); /* bit i: supports DLPack device type i */
  void* self TE_FL_INIT(NULL);         /* passed to the functions below */
  te_fl_status (*run)(void* self, const te_fl_context* ctx, const void* args)
      TE_FL_INIT(NULL); /* required */
  te_fl_status (*supports)(void* self, const te_fl_context* ctx, const void* args) TE_FL_INIT(NULL);
  te_fl_status (*workspace)(void* self, const te_fl_context* ctx, const void* args, size_t* bytes)
      TE_FL_INIT(NULL);
  te_fl_status (*saved_bytes)(void* self, const te_fl_context* ctx, const void* args, size_t* bytes)
      TE_FL_INIT(NULL);
  /* Makes a plan for one full signature of a call. The signature consists of dtypes, shapes,
     strides, alignment (up to 256 bytes), scaling modes, the parts present in each tensor, which
     outputs begin at the address of another argument, all scalars, the saved record (for a record
     that the op fills: its storage only), device, context flags, and which addresses rng has.
     TE_FL_CALL_CAPTURING and TE_FL_CALL_VALIDATE are not part of it, so that a captured call finds
     the plan of an earlier call that was not captured.

     Every call with the signature gets the plan in ctx->plan, in workspace() and run(), possibly
     several calls at once. A plan must therefore depend on nothing else: no address, stream, seed
     or offset. The host keeps a bounded number of plans. It destroys the plans of a device that is
     being withdrawn after quiesce() and before destroy() of the device's plugin. */
  te_fl_status (*prepare)(void* self, const te_fl_context* ctx, const void* args, void** plan)
      TE_FL_INIT(NULL);
  /* required if `prepare` is set */
  void (*destroy_plan)(void* self, void* plan) TE_FL_INIT(NULL);
  /* schema of a custom op (R17); NULL for an op of the catalogue */
  const te_fl_op_schema* schema TE_FL_INIT(NULL);
  const char* vendor TE_FL_INIT(NULL); /* NULL: the plugin's vendor */
  /* Name of the provider whose kDLExtDev devices the implementation supports (R18). NULL: the
     provider of the devices that the plugin itself enumerates. The plugin is refused if these
     devices have two providers. */
  const char* provider TE_FL_INIT(NULL);
  /* Names of the arguments with TE_FL_ARG_LATER that the implementation supports, separated by
     spaces (R23). NULL: none. This also applies to custom ops. */
  const char* later_args TE_FL_INIT(NULL);
  uint64_t stream_state_bytes TE_FL_INIT(0); /* bytes of state per stream (R27); 0: none */
  /* Writes a few words to `text`: the kernel or library function that run() would launch for a call
     that supports() accepts, and the reason (R31). ctx has neither workspace nor plan. NULL: the
     implementation has nothing to add to its impl_id. */
  te_fl_status (*describe)(void* self, const te_fl_context* ctx, const void* args,
                           const te_fl_error_sink* text) TE_FL_INIT(NULL);
} te_fl_op_desc;

/* ---- devices ---- */

typedef struct te_fl_device_props {
  uint32_t struct_size;
  uint32_t arch;         /* in the provider's numbering, e.g. 90 for sm_90; 0 for the host */
  uint64_t total_memory; /* bytes */
  uint64_t free_memory;  /* bytes, at the time of the call */
  uint32_t compute_units;
  uint32_t reserved;
  double copy_bandwidth; /* bytes read plus bytes written per second; 0 until measured */
  char name[128];
  char driver[64]; /* version of the driver or runtime, "CUDA 13.0"; empty if there is none */
} te_fl_device_props;

/* Kinds of memory. Every device has DEVICE. A device without another kind, or without the requested
   alignment, returns UNSUPPORTED, and its error text names which of the two it lacks. */
typedef enum te_fl_memory_kind {
  TE_FL_MEMORY_DEVICE = 0,
  TE_FL_MEMORY_PINNED = 1,  /* host memory; copies between it and the device may be asynchronous */
  TE_FL_MEMORY_MANAGED = 2, /* accessible by host and device at one address */
  TE_FL_MEMORY_PEER = 3, /* device memory that other devices of the provider may read and write */
  TE_FL_MEMORY_KIND_COUNT = 4
} te_fl_memory_kind;

typedef struct te_fl_memory_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_memory_desc));
  uint32_t kind TE_FL_INIT(TE_FL_MEMORY_DEVICE); /* te_fl_memory_kind */
  uint64_t bytes TE_FL_INIT(0);
  uint64_t alignment TE_FL_INIT(256); /* a power of two, at least 256; the host checks this */
  uint32_t flags TE_FL_INIT(0);       /* no flag is defined yet; must be 0 */
  uint32_t reserved TE_FL_INIT(0);
  /* for DEVICE, MANAGED and PEER memory: the stream that will use it */
  void* stream TE_FL_INIT(NULL);
} te_fl_memory_desc;

enum {                             /* flags of create_event */
       TE_FL_EVENT_TIMED = 1u << 0 /* the event will be passed to elapsed_time() */
};

/* Functions of one device. `self` is te_fl_device_desc.self. Streams are opaque; NULL is the
   default stream. Any thread may call any function. Memory is stream-ordered: memory from
   allocate() is used on `stream`, and work that was enqueued there before free() may still use
   it. */
typedef struct te_fl_device_api {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_device_api));
  uint32_t reserved TE_FL_INIT(0);
  te_fl_status (*allocate)(void* self, const te_fl_memory_desc* memory, void** out,
                           const te_fl_error_sink*) TE_FL_INIT(NULL); /* required */
  /* `kind` is the kind that the memory was allocated with. Required. */
  te_fl_status (*free)(void* self, void* data, uint32_t kind, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Copies between the host and this device, or within this device. host_flags gives the direction:
     bit 0: dst is host memory; bit 1: src is host memory. The copy is ordered on the stream. If src
     is host memory that is not pinned, it has been read when the function returns. */
  te_fl_status (*copy)(void* self, void* dst, const void* src, size_t bytes, uint32_t host_flags,
                       void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL); /* required */
  te_fl_status (*fill)(void* self, void* dst, uint8_t value, size_t bytes, void* stream,
                       const te_fl_error_sink*) TE_FL_INIT(NULL); /* required */
  te_fl_status (*create_stream)(void* self, void** stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*destroy_stream)(void* self, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Waits for the stream. An error may stem from any op that was enqueued before. INVALID_ARGUMENT
     means that such an op found invalid values in device memory (R12); the device remains usable.
     Required. */
  te_fl_status (*synchronize)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*create_event)(void* self, uint32_t flags, void** event, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*destroy_event)(void* self, void* event, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*record_event)(void* self, void* event, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Makes the stream wait; the host does not wait. The event may belong to another device whose
     table has this very function (R24). */
  te_fl_status (*wait_event)(void* self, void* event, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*synchronize_event)(void* self, void* event, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* The host calls this function before every op. INVALID_ARGUMENT from both this function and
     check_stream means that the stream does not belong to the device; the op is then refused before
     anything is allocated or enqueued. UNSUPPORTED means that the device cannot capture. Any other
     error becomes the error of the op, which does not run. */
  te_fl_status (*is_capturing)(void* self, void* stream, int32_t* capturing,
                               const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Writes only within `props->struct_size`, which the host has set (R3). Required. */
  te_fl_status (*properties)(void* self, te_fl_device_props* props, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Graph capture (R19). A device can capture only if it has all five functions: is_capturing and
     the four below. Between begin_capture and end_capture, work that is enqueued on `stream` is
     recorded and not run. One thread makes both calls; other threads may work on other streams
     meanwhile. The default stream (NULL) cannot be captured. end_capture ends the capture even if
     it fails. A graph may be launched any number of times; one launch is enqueued after the other.
     destroy_graph may be called while a launch is still running; the device then finishes that
     launch first. */
  te_fl_status (*begin_capture)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*end_capture)(void* self, void* stream, void** graph, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*launch_graph)(void* self, void* graph, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*destroy_graph)(void* self, void* graph, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Checks for TE_FL_VALIDATE=1. The host also calls check_stream after is_capturing has refused a
     stream, and check_pointer for the first blocks of an allocator (R25). Each returns OK or
     INVALID_ARGUMENT with a text that says what the argument is instead ("it is pageable host
     memory"). check_pointer: may kernels of this device read and write these bytes? check_stream:
     does the stream belong to this device? */
  te_fl_status (*check_pointer)(void* self, const void* data, size_t bytes, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  te_fl_status (*check_stream)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Copies bytes from another device to this one; src_self is te_fl_device_desc.self of the source.
     Called only if the tables of both devices have this very function. Ordered on both streams: the
     copy runs after all work enqueued earlier on either stream, and before all work enqueued later
     on either. UNSUPPORTED: the function cannot copy between these two devices; the host then
     copies through host memory, as it does if this slot is NULL. Neither stream is being
     captured. */
  te_fl_status (*copy_between)(void* self, void* dst, void* dst_stream, void* src_self,
                               const void* src, void* src_stream, size_t bytes,
                               const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* The owner of `stream`, which create_stream did not make, is about to destroy it (R22). The
     device drops what it keeps for the stream, such as freed memory that its next allocation would
     reuse. Work may still be running on the stream. */
  te_fl_status (*retire_stream)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Sets `done` to 1 if the work before the event's last record is done, or if the event has never
     been recorded. Never waits. */
  te_fl_status (*query_event)(void* self, void* event, int32_t* done, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Nanoseconds between the recorded times of two events, 0 if `end` came first. The host ensures
     that both were created with TE_FL_EVENT_TIMED and are done. */
  te_fl_status (*elapsed_time)(void* self, void* start, void* end, uint64_t* nanoseconds,
                               const te_fl_error_sink*) TE_FL_INIT(NULL);
} te_fl_device_api;

/* A memory allocator that a program installs for a device (R25). Plugins do not provide one. */
typedef struct te_fl_allocator {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_allocator));
  uint32_t reserved TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL); /* for messages, "torch"; copied; required */
  void* self TE_FL_INIT(NULL);       /* passed to the functions below */
  /* Returns memory of kind DEVICE for use on memory->stream. OUT_OF_MEMORY: the allocator has none
     and can get none; the host then calls trim() and tries once more. Required. */
  te_fl_status (*allocate)(void* self, const te_fl_memory_desc* memory, void** out,
                           const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Work that is already enqueued on the stream of the allocation, or on a stream named by
     record_stream, may still use the memory. Required. */
  te_fl_status (*free)(void* self, void* data, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Until free(), work on `stream` may use memory that was allocated for another stream.
     Required. */
  te_fl_status (*record_stream)(void* self, void* data, void* stream, const te_fl_error_sink*)
      TE_FL_INIT(NULL);
  /* Returns unused cached memory to the device, at least `bytes` if possible, so that others can
     allocate it. NULL: the allocator caches nothing. */
  te_fl_status (*trim)(void* self, uint64_t bytes, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* A stream of the device is about to be destroyed (R22), whether te-fl made it or not. The
     allocator drops what it keeps for the stream. NULL: the allocator keeps nothing per stream. */
  te_fl_status (*retire_stream)(void* self, void* stream, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Called once, after the last memory of this allocator has been freed, when the allocator has
     been replaced or removed or the device has been removed. NULL: nothing to do. */
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

/* Key-value store by which the ranks of one communicator exchange addresses while the communicator
   is made. The host provides it. Valid during create() and split(), and as long as the communicator
   lives. Any thread may use it. The provider chooses the keys; each communicator has its own key
   space. */
typedef struct te_fl_comm_store {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_store));
  uint32_t reserved TE_FL_INIT(0);
  void* host TE_FL_INIT(NULL);
  /* Sets a key. Each key is set only once. */
  te_fl_status (*set)(void* host, const char* key, const void* value, size_t bytes,
                      const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Waits until a rank has set the key; returns TIMEOUT after timeout_ms. Writes the value's size
     to `bytes`. Copies the value to `value` if `capacity` is large enough; otherwise returns
     INVALID_ARGUMENT. */
  te_fl_status (*get)(void* host, const char* key, uint32_t timeout_ms, void* value,
                      size_t capacity, size_t* bytes, const te_fl_error_sink*) TE_FL_INIT(NULL);
} te_fl_comm_store;

/* Parameters for making a communicator. Valid during the call only, except `store`. */
typedef struct te_fl_comm_config {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_config));
  uint32_t device_provider TE_FL_INIT(0); /* as te_fl_tensor.provider */
  te_fl_device device TE_FL_INIT({});     /* the device that this rank's ops will run on */
  int32_t rank TE_FL_INIT(0);
  int32_t size TE_FL_INIT(1);
  const char* name TE_FL_INIT(NULL); /* for messages, "world" */
  /* The bytes that unique_id() returned on rank 0. NULL and 0 if the provider has no
     unique_id(). */
  const void* id TE_FL_INIT(NULL);
  size_t id_bytes TE_FL_INIT(0);
  const te_fl_comm_store* store TE_FL_INIT(NULL); /* never NULL */
  uint32_t timeout_ms TE_FL_INIT(0);              /* see R33; 0: no time limit */
  uint32_t flags TE_FL_INIT(0);                   /* no flag is defined yet; must be 0 */
} te_fl_comm_config;

/* Functions of a provider of collectives. `self` is te_fl_comm_desc.self; `comm` is the
   communicator that create() or split() returned. */
typedef struct te_fl_comm_api {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_api));
  uint32_t reserved TE_FL_INIT(0);
  /* Called on rank 0 before create(). Writes bytes, of any number, by which the ranks find each
     other; the host passes them to all ranks. A call with capacity 0 returns the number of bytes
     only. NULL: create() needs no id. */
  te_fl_status (*unique_id)(void* self, void* id, size_t capacity, size_t* bytes,
                            const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Makes a communicator. Called on every rank. Required. */
  te_fl_status (*create)(void* self, const te_fl_comm_config* config, void** comm,
                         const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Sets `done` to 1 once the communicator can be used. If the communicator cannot be made, the
     status says why. Never waits. NULL: the communicator can be used as soon as create() or split()
     has returned. */
  te_fl_status (*ready)(void* comm, int32_t* done, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Every rank of `comm` calls this function. Ranks with the same config->name form one new
     communicator, with the rank and size that the config states. NULL: the host calls create() for
     the new communicator instead. */
  te_fl_status (*split)(void* comm, const te_fl_comm_config* config, int32_t color, void** out,
                        const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Called when no op of the communicator is running on the host. Ops may still be running on a
     device: the function waits for them, unless the communicator was aborted. Each rank calls it
     independently, so it waits for no other rank. Required. */
  void (*destroy)(void* comm) TE_FL_INIT(NULL);
  /* Aborts the communicator (R32). May be called several times. Required. */
  void (*abort)(void* comm) TE_FL_INIT(NULL);
  /* Returns OK, or COMM_FAILED if the communicator failed outside of a call. The host polls this
     function; it never waits. NULL: the communicator's failures all appear in the status of a
     call. */
  te_fl_status (*async_error)(void* comm, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Both functions are present, or neither (R33). The status of group_end() is the status of the
     ops in the group. */
  te_fl_status (*group_start)(void* self, const te_fl_error_sink*) TE_FL_INIT(NULL);
  te_fl_status (*group_end)(void* self, const te_fl_error_sink*) TE_FL_INIT(NULL);
  /* Version of the underlying library, "2.28.9", for comparison between ranks. NULL: the plugin's
     version is sufficient. The string is valid until destroy() of the plugin. */
  const char* (*version)(void* self)TE_FL_INIT(NULL);
} te_fl_comm_api;

enum { /* te_fl_comm_desc.flags */
       /* The communicator's ops may be captured into graphs if their implementations say so. */
       TE_FL_COMM_CAPTURABLE = 1u << 0,
       /* The ranks must be threads of one process; the provider cannot connect processes. */
       TE_FL_COMM_THREADS_ONLY = 1u << 1
};

/* A provider of communicators. The plugin that registers it also implements ops of class collective
   for its communicators. */
typedef struct te_fl_comm_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_comm_desc));
  uint32_t flags TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL); /* "nccl"; [a-z0-9_]+; unique in a process; required */
  uint32_t kind TE_FL_INIT(0);       /* te_fl_kind; policies select providers by it */
  int32_t priority TE_FL_INIT(0);    /* 0: the default priority of the kind */
  /* bit i: tensors on devices of DLPack type i may be arguments of the communicator's ops */
  uint64_t device_types TE_FL_INIT(0);
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

/* Facts about the host that a plugin may base its answer to the query on. Valid during the query
   only. */
typedef struct te_fl_host_info {
  uint32_t struct_size;
  uint32_t abi_major;
  uint32_t abi_minor;
  uint32_t reserved;
  const char* version; /* version of te-fl, "0.1.0" */
} te_fl_host_info;

/* Services of the host that a plugin may call, from any thread. Valid from create() until destroy()
   returns. */
typedef struct te_fl_host_api {
  uint32_t struct_size;
  uint32_t reserved;
  void* host;
  void (*log)(void* host, int32_t level, const char* text);
  /* Returns the value of a TE_FL_* setting, given by the environment or by the program and checked
     against its type (a bool is "0" or "1"). If the plugin declared the setting (R21) and it is
     unset, returns the declared default. NULL: the setting is unset and has no default. The string
     is valid until destroy(). */
  const char* (*setting)(void* host, const char* name);
  /* Allocates memory of any device, including the host, as te_fl_device_api.allocate describes
     (R28). `provider` is te_fl_context.provider: 0 unless the device is kDLExtDev. */
  te_fl_status (*allocate)(void* host, te_fl_device device, uint32_t provider,
                           const te_fl_memory_desc* memory, void** out, const te_fl_error_sink*);
  void (*free)(void* host, te_fl_device device, uint32_t provider, void* data, uint32_t kind,
               void* stream);
  /* The description of a scaling mode (R30). NULL for NONE and for a number that the host does not
     know. The pointer stays valid for the life of the process. */
  const te_fl_scaling_desc* (*scaling)(void* host, uint32_t scaling);
} te_fl_host_api;

/* Something that a plugin found in its environment, such as a driver, a library that it opens, or a
   chip. */
typedef enum te_fl_finding_level {
  TE_FL_FINDING_OK = 0,
  TE_FL_FINDING_NOTE = 1,   /* something is missing that only some users need */
  TE_FL_FINDING_PROBLEM = 2 /* the plugin cannot do what it was installed for */
} te_fl_finding_level;

typedef struct te_fl_finding {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_finding));
  int32_t level TE_FL_INIT(0);          /* te_fl_finding_level */
  const char* subject TE_FL_INIT(NULL); /* "driver", "libacmeblas" */
  const char* state TE_FL_INIT(NULL);   /* version and path, or what is wrong */
  /* features that do not work for this reason; NULL: none */
  const char* disables TE_FL_INIT(NULL);
  const char* remedy TE_FL_INIT(NULL); /* a package to install, a setting to change; NULL: none */
} te_fl_finding;

typedef struct te_fl_finding_sink {
  uint32_t struct_size;
  uint32_t reserved;
  void* host;
  void (*write)(void* host, const te_fl_finding* finding); /* required; copies the finding */
} te_fl_finding_sink;

typedef struct te_fl_plugin_api {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_plugin_api));
  uint32_t reserved TE_FL_INIT(0);
  /* Makes the instance. After a failure nothing remains: no thread and no device memory.
     Required. */
  te_fl_status (*create)(const te_fl_host_api* host, void** instance,
                         const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  /* Arrays of pointers to descriptors, valid until destroy() (R7). A NULL slot: the plugin has
     none. */
  te_fl_status (*devices)(void* instance, uint32_t* count, const te_fl_device_desc* const** list,
                          const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  te_fl_status (*ops)(void* instance, uint32_t* count, const te_fl_op_desc* const** list,
                      const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  te_fl_status (*quiesce)(void* instance, const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  void (*destroy)(void* instance) TE_FL_INIT(NULL); /* required */
  /* Reports what the plugin found and what it lacks, one finding each, for `te-fl info` and `te-fl
     doctor`. May open libraries and query drivers. Never called during an op. */
  te_fl_status (*diagnose)(void* instance, const te_fl_finding_sink* findings,
                           const te_fl_error_sink* errors) TE_FL_INIT(NULL);
  /* Providers of collectives (R29), in the same form as devices() and ops(). */
  te_fl_status (*comms)(void* instance, uint32_t* count, const te_fl_comm_desc* const** list,
                        const te_fl_error_sink* errors) TE_FL_INIT(NULL);
} te_fl_plugin_api;

/* The types of a setting (R21). */
typedef enum te_fl_setting_type {
  TE_FL_SETTING_STRING = 0,
  TE_FL_SETTING_BOOL = 1, /* setting() returns "0" or "1" */
  TE_FL_SETTING_INT = 2,
  TE_FL_SETTING_ENUM = 3,
  TE_FL_SETTING_LIST = 4, /* comma separated */
  /* Path of a file that controls what the plugin runs. The file's contents are part of the
     fingerprint. The setting is ignored if the process runs with elevated privileges. */
  TE_FL_SETTING_FILE = 5
} te_fl_setting_type;

typedef struct te_fl_setting_desc {
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_setting_desc));
  uint32_t type TE_FL_INIT(0);                /* te_fl_setting_type */
  const char* name TE_FL_INIT(NULL);          /* "TE_FL_ACME_DEBUG" */
  const char* default_value TE_FL_INIT(NULL); /* in the form that setting() returns; NULL: none */
  /* ENUM: the permitted words, separated by spaces. INT: "MIN MAX", or NULL for no bounds. Other
     types: NULL. */
  const char* choices TE_FL_INIT(NULL);
  const char* doc TE_FL_INIT(NULL); /* a sentence for `te-fl env`; required */
} te_fl_setting_desc;

/* The first four members are at the same place in every major version, so that any host can read
   the version. */
typedef struct te_fl_plugin_header {
  uint32_t magic TE_FL_INIT(TE_FL_PLUGIN_MAGIC); /* TE_FL_PLUGIN_MAGIC */
  uint32_t struct_size TE_FL_INIT(sizeof(te_fl_plugin_header));
  uint32_t abi_major TE_FL_INIT(TE_FL_ABI_MAJOR);
  uint32_t abi_minor TE_FL_INIT(TE_FL_ABI_MINOR);
  /* the oldest host minor that the plugin works with (R2) */
  uint32_t min_host_minor TE_FL_INIT(0);
  /* facts that a host must know or else refuse the plugin (R2); none is defined yet: 0 */
  uint32_t features TE_FL_INIT(0);
  const char* name TE_FL_INIT(NULL);   /* lower case, [a-z0-9_]+ */
  const char* vendor TE_FL_INIT(NULL); /* e.g. "nvidia"; "te-fl" for the portable backends */
  const char* version TE_FL_INIT(NULL);
  const char* build_id
      TE_FL_INIT(NULL); /* changes with every build; NULL: the host uses the ELF build id */
  const te_fl_plugin_api* api TE_FL_INIT(NULL);
  const void* reserved[4] TE_FL_INIT({});
  /* declared settings (R21); NULL: none */
  const te_fl_setting_desc* const* settings TE_FL_INIT(NULL);
  uint32_t setting_count TE_FL_INIT(0);
  uint32_t reserved2 TE_FL_INIT(0);
} te_fl_plugin_header;

/* The one exported symbol (R1). Returns NULL only if the plugin cannot work with this host at
   all. */
typedef const te_fl_plugin_header* (*te_fl_plugin_query_fn)(const te_fl_host_info* host);
#define TE_FL_PLUGIN_QUERY_SYMBOL "te_fl_plugin_query"

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* TE_FL_PLUGIN_H_ */
