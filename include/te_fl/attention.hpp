// Holds the rules on which every implementation of fused_attn_fwd and fused_attn_bwd must agree:
// how a layout is decoded, which calls are refused and with what words, and which query sees which
// key. Header-only; sees backend.hpp and the argument structs alone, so that any backend can use
// it.
//
//   attention/mask.hpp     MaskRule: the keys that a query sees. constexpr.
//   attention/problem.hpp  AttentionProblem: a call decoded and checked. Metadata only.
//   attention/host.hpp     lengths and masks read from element data. Host memory only.
//
// The semantics, in one place. q_len and kv_len are the numbers of queries and keys of sequence b:
// its true lengths (from cu_seqlens) with layout thd or a padding mask type, else Sq and Sk.
//  - diagonal = 0 with causal and padding_causal, else kv_len - q_len (arbitrary: Sk - Sq).
//    Query i is level with key i + diagonal; a negative one leaves the first queries without keys.
//  - The causal types mask keys j > i + diagonal.
//  - window_left >= 0 masks j < i + diagonal - window_left, window_right >= 0 masks
//    j > i + diagonal + window_right, on top of any mask type.
//  - Queries i >= q_len and keys j >= kv_len are padding and masked.
//  - arbitrary masks where attn_mask is not 0.
//  - A score is cap(scale * q.k) + bias + ALiBi; ALiBi is slope * (j - i - (kv_len - q_len)) for
//    every mask type. (A constant per row moves the log-sum-exp, not a vanilla softmax.) With
//    softcap > 0, cap(x) is softcap * tanh(x / softcap), else x. Its slope 1 - tanh^2 is a factor
//    of dS on the way to dQ and dK; dbias and dsink are the gradients behind the cap, without it.
//  - off_by_one and learnable add a sink's logit, 0 or softmax_sink[h] (not scaled), to the
//    denominator and to the log-sum-exp.
//  - A row without keys, or whose scores are all -inf, yields o = 0, log-sum-exp -inf (with a sink
//    too) and no gradient. So do padding queries, and thd tokens outside every sequence.
//  - Dropout acts on the probabilities. Element ((b H + h) Sq + i) Sk + j of the random stream
//    decides; thd takes max_seqlen_q and max_seqlen_kv for Sq and Sk, or the longest lengths where
//    these are 0.
//  - FP8: s_quant quantises the probabilities after dropout: for dV = P^T dO themselves, for P V
//    their quotients by the row's largest before dropout, under a scale of at most the type's
//    largest number times 1 - dropout_p (those reach 1 / (1 - dropout_p)). Its amax is that of the
//    probabilities. dp_quant quantises dS, times the cap's slope (for dQ and dK). Without them P
//    and dS stay FP32. dbias and dsink come from the unquantised values.
#pragma once

#include "te_fl/attention/host.hpp"
#include "te_fl/attention/mask.hpp"
#include "te_fl/attention/problem.hpp"
