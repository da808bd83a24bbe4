// Constants of cuDNN 9's graph API that the plugin uses, fixed by cuDNN's ABI: descriptor types,
// attributes, and the types and values of attributes.
#pragma once

namespace te_fl::cuda {

namespace cudnn_type {  // the types of descriptors
enum {
  kPointwise = 0,
  kEngineConfig = 3,
  kEngineHeuristics = 4,
  kPlan = 5,
  kPointwiseOperation = 13,
  kOperationGraph = 15,
  kVariantPack = 16,
  kTensor = 17,
  kMatmul = 18,
  kMatmulOperation = 19,
  kReduction = 21,
  kReductionOperation = 22,
  kReshapeOperation = 31,
  kDeviceProperties = 38,
};
}  // namespace cudnn_type

namespace cudnn_of {  // the types of attributes' values
enum {
  kDataType = 1,
  kBool = 2,
  kInt64 = 3,
  kPointer = 6,
  kHeuristicMode = 8,
  kPointwiseMode = 14,
  kDescriptor = 15,
  kReductionMode = 18,
  kInt32 = 23,
  kChar = 24,
};
}  // namespace cudnn_of

namespace cudnn_attr {
enum {
  kPointwiseMode = 0,
  kPointwisePrecision = 1,
  kPointwiseAxis = 9,
  kHeuristicMode = 200,
  kHeuristicGraph = 201,
  kHeuristicResults = 202,
  kHeuristicDevice = 204,
  kPlanEngineConfig = 401,
  kPlanWorkspace = 402,
  kPlanDevice = 407,
  kPointwiseDescriptor = 750,
  kPointwiseX = 751,
  kPointwiseB = 752,
  kPointwiseY = 753,
  kPointwiseT = 758,
  kGraphOperations = 801,
  kTensorAlignment = 900,
  kTensorDataType = 901,
  kTensorDims = 902,
  kTensorStrides = 903,
  kTensorId = 906,
  kTensorVirtual = 907,
  kTensorByValue = 908,
  kTensorRaggedOffset = 913,
  kPackIds = 1000,
  kPackPointers = 1001,
  kPackWorkspace = 1003,
  kMatmulPrecision = 1500,
  kMatmulA = 1520,
  kMatmulB = 1521,
  kMatmulC = 1522,
  kMatmulDescriptor = 1523,
  kMatmulRows = 1525,  // rows of A, at run time
  kMatmulCols = 1526,  // columns of B, at run time
  kMatmulInner = 1527,
  kReductionMode = 1600,
  kReductionPrecision = 1601,
  kReductionX = 1610,
  kReductionY = 1611,
  kReductionDescriptor = 1612,
  kReshapeX = 2200,
  kReshapeY = 2201,
  kDeviceIndex = 2700,
};
}  // namespace cudnn_attr

namespace cudnn_data {
enum { kF32 = 0, kF16 = 2, kI32 = 4, kBF16 = 9, kI64 = 10, kBool = 11, kE4M3 = 12, kE5M2 = 13 };
}  // namespace cudnn_data

namespace cudnn_pointwise {
enum {
  kAdd = 0,
  kMul = 1,
  kDiv = 6,
  kSub = 9,
  kExp = 13,
  kLog = 15,
  kIdentity = 21,
  kGreater = 302,
  kGreaterEqual = 303,
  kLess = 304,
  kAnd = 400,
  kIndex = 501,
  kSelect = 601,
};
}  // namespace cudnn_pointwise

namespace cudnn_reduction {
enum { kAdd = 0, kMax = 3, kAmax = 4 };
}  // namespace cudnn_reduction

constexpr int kCudnnHeuristicA = 3;

}  // namespace te_fl::cuda
