// Holds the rules on which every implementation of fused_attn_fwd and fused_attn_bwd must agree:
// how a layout is decoded, which calls are refused and with which message, and which query sees
// which key. Header-only; includes only backend.hpp and the argument structs, so that any backend
// can use it.
//
//   attention/mask.hpp     MaskRule: the keys that a query sees. constexpr.
//   attention/problem.hpp  AttentionProblem: a decoded and checked call. Metadata only.
//   attention/host.hpp     Sequence lengths and masks, read from element data. Host memory only.
//
// The semantics. q_len and kv_len are the numbers of queries and keys of sequence b: with layout
// thd or a padding mask type the true lengths from cu_seqlens, otherwise Sq and Sk.
//  - diagonal = 0 with mask types causal and padding_causal, else kv_len - q_len (for arbitrary:
//    Sk - Sq). Query i is aligned with key i + diagonal. If diagonal is negative, the first queries
//    have no keys.
//  - The causal types mask keys j > i + diagonal.
//  - window_left >= 0 masks j < i + diagonal - window_left, window_right >= 0 masks
//    j > i + diagonal + window_right, in addition to any mask type.
//  - Queries i >= q_len and keys j >= kv_len are padding and masked.
//  - arbitrary masks the elements where attn_mask is not 0.
//  - A score is cap(scale * q.k) + bias + ALiBi, where ALiBi is slope * (j - i - (kv_len - q_len))
//    for every mask type. (A constant added to a row changes its log-sum-exp, but not a vanilla
//    softmax.) With softcap > 0, cap(x) = softcap * tanh(x / softcap), else cap(x) = x. dQ and dK
//    are computed from dS times the derivative of cap, 1 - tanh^2(x / softcap). dbias and dsink are
//    gradients after the cap and do not contain this factor.
//  - off_by_one and learnable add the logit of a sink, 0 or softmax_sink[h] (not scaled), to the
//    denominator and to the log-sum-exp.
//  - A row without keys, or whose scores are all -inf, gives o = 0, log-sum-exp = -inf (also with a
//    sink) and no gradient. The same holds for padding queries and for thd tokens outside every
//    sequence.
//  - Dropout is applied to the probabilities. Random number ((b H + h) Sq + i) Sk + j decides
//    whether probability (b, h, i, j) is dropped. With thd, Sq and Sk are max_seqlen_q and
//    max_seqlen_kv, or the longest lengths where these are 0.
//  - FP8: s_quant quantises the probabilities after dropout. For dV = P^T dO it quantises the
//    probabilities themselves. For P V it quantises them divided by the row's largest probability
//    before dropout; the scale used there is at most the type's largest number times
//    1 - dropout_p, because the quotients reach 1 / (1 - dropout_p). The amax of s_quant is that of
//    the probabilities. dp_quant quantises dS times the derivative of cap (for dQ and dK). Without
//    s_quant and dp_quant, P and dS stay FP32. dbias and dsink come from the unquantised values.
#pragma once

#include "te_fl/attention/host.hpp"
#include "te_fl/attention/mask.hpp"
#include "te_fl/attention/problem.hpp"
