"""Tests te_fl.pytorch under adverse conditions: memory freed before the backward, forked workers, interrupts, and any order of imports."""

import functools
import itertools
import os
import pathlib
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock

import torch
import torch.utils.checkpoint

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from forkserver import PYTHON  # noqa: E402
from torch_cases import RECIPES, Each, each, gradients, make_input, scope  # noqa: E402
from torch_oracle import randn, randomise  # noqa: E402

import te_fl  # noqa: E402
from te_fl import _native  # noqa: E402
import te_fl.pytorch as te  # noqa: E402
from te_fl.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from te_fl.errors import FailedPrecondition  # noqa: E402
from te_fl.pytorch.autograd import saved_hooks  # noqa: E402
from te_fl.pytorch.fp8 import quantization  # noqa: E402


def calls():
    """Returns {name: (a module, the tensors of a call of it, the function that makes the call)}."""
    def attention(**options):
        return te.DotProductAttention(4, 8, attention_dropout=0.0, **{"qkv_format": "bshd", "attn_mask_type": "no_mask", **options})

    def attend(module, q, k, v, **more):
        return module(q, k, v, **more)

    def of(*shape, seed=1, trained=True):
        return randn(*shape, seed=seed).requires_grad_(trained)

    def padding(of_first):
        mask = torch.zeros(2, 1, 1, 6, dtype=torch.bool)
        mask[0, ..., of_first:] = True
        return mask

    qkv = {n: of(2, 6, 4, 8, seed=i) for i, n in enumerate("qkv")}
    packed = {n: of(12, 4, 8, seed=i) for i, n in enumerate("qkv")}
    x, hidden = {"x": of(6, 2, 32)}, randn(1, 1, 6, 6, seed=3) > 1
    sums = {"cu_seqlens_q": torch.tensor([0, 4, 9], dtype=torch.int32), "cu_seqlens_kv": torch.tensor([0, 5, 11], dtype=torch.int32)}
    padded = {"cu_seqlens_q_padded": torch.tensor([0, 6, 12], dtype=torch.int32), "cu_seqlens_kv_padded": torch.tensor([0, 6, 12], dtype=torch.int32)}
    bias, angles = {"core_attention_bias": of(1, 4, 6, 6, seed=4)}, {"rotary_pos_emb": te.RotaryPositionEmbedding(8)(6).cpu()}

    def layer(**options):
        return randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu", **options))

    return {
        "causal": (attention(attn_mask_type="causal"), qkv, attend),
        "arbitrary": (attention(attn_mask_type="arbitrary"), {**qkv, "attention_mask": hidden}, attend),
        "causal and a mask": (attention(attn_mask_type="causal"), {**qkv, "attention_mask": hidden}, attend),
        "padding": (attention(attn_mask_type="padding"), {**qkv, "attention_mask": padding(4)}, attend),
        "a pair": (attention(attn_mask_type="padding"), {**qkv, "of_q": padding(3), "of_kv": padding(4)},
                   lambda m, of_q, of_kv, **more: attend(m, attention_mask=(of_q, of_kv), **more)),
        "lengths": (attention(attn_mask_type="padding"), {**qkv, "cu_seqlens_q": torch.tensor([0, 3, 9], dtype=torch.int32),
                                                          "cu_seqlens_kv": torch.tensor([0, 6, 10], dtype=torch.int32)}, attend),
        "packed": (attention(attn_mask_type="padding", qkv_format="thd"), {**packed, **sums, **padded},
                   lambda m, **more: attend(m, max_seqlen_q=6, max_seqlen_kv=6, **more)),
        "bias": (attention(), {**qkv, **bias}, lambda m, **more: attend(m, core_attention_bias_type="post_scale_bias", **more)),
        "bias before": (attention(), {**qkv, **bias}, lambda m, **more: attend(m, core_attention_bias_type="pre_scale_bias", **more)),
        "slopes": (attention(attn_mask_type="causal"), {**qkv, "alibi_slopes": of(4, seed=5, trained=False)},
                   lambda m, **more: attend(m, core_attention_bias_type="alibi", **more)),
        "slopes without a mask": (attention(), {**qkv, "alibi_slopes": of(4, seed=5, trained=False)},
                                  lambda m, **more: attend(m, core_attention_bias_type="alibi", **more)),
        "sink": (attention(softmax_type="learnable"), qkv, attend),
        "heads": (randomise(te.MultiheadAttention(32, 4, attention_dropout=0, input_layernorm=True, device="cpu")), {**x, **angles},
                  lambda m, x, **more: m(x, **more)),
        "cross": (randomise(te.MultiheadAttention(32, 4, attention_dropout=0, attention_type="cross", device="cpu")),
                  {**x, "encoder_output": of(6, 2, 32, seed=2)}, lambda m, x, **more: m(x, **more)),
        "layer": (layer(self_attn_mask_type="padding"), {**x, **angles, "attention_mask": padding(4)}, lambda m, x, **more: m(x, **more)),
        "layer with a bias": (layer(self_attn_mask_type="arbitrary"), {**x, **bias, "attention_mask": hidden},
                              lambda m, x, **more: m(x, core_attention_bias_type="post_scale_bias", **more)),
        "decoder": (layer(layer_type="decoder"), {**x, "encoder_output": of(6, 2, 32, seed=2)}, lambda m, x, **more: m(x, **more)),
        "experts": (randomise(te.GroupedLinear(2, 32, 32, device="cpu")), {**x, "m_splits": torch.tensor([5, 7])},
                    lambda m, x, m_splits: m(x.view(12, 32), m_splits)),
        "normalised too": (randomise(te.LayerNormLinear(32, 32, return_layernorm_output=True, device="cpu")), x, lambda m, x: m(x)),
        "mlp": (randomise(te.LayerNormMLP(32, 64, activation="swiglu", device="cpu")), x, lambda m, x: m(x)),
        "operations": (randomise(te.ops.Sequential(te.ops.RMSNorm(32, device="cpu"), te.ops.Linear(32, 64, device="cpu"), te.ops.SwiGLU(),
                                                   te.ops.Linear(32, 32, device="cpu"))), x, lambda m, x: m(x)),
    }


class Memory(Each):
    """Tests changes to a forward's tensors before its backward. torch_autograd_test.py covers changes that version counters detect."""

    @each(recipes=RECIPES[:3])
    def test_names_may_go(self, module, device, recipe):
        for drops in (False, True):
            module.zero_grad()
            x = make_input(device)
            hidden = x * 1
            with scope(recipe):
                y = module(hidden)
            if drops:
                del hidden
                junk = [torch.full_like(x, 7) for _ in range(4)]
            y.sum().backward()
            if not drops:
                want = gradients(module, x)
            elif not isinstance(recipe, DelayedScaling):  # delayed scaling's scales have changed since the forward
                self.same(gradients(module, x), want)
        del junk

    @each(recipes=(None,))
    def test_storage_that_was_freed_or_replaced(self, module, device, _):
        def free(t):
            t.untyped_storage().resize_(0)

        def move(t):
            t.untyped_storage().resize_(16 * t.untyped_storage().nbytes())

        def shrink(t):
            t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1)

        def refill(t):  # refills the tensor, as Megatron's CheckpointWithoutOutput does
            kept, size = t.detach().clone(), t.untyped_storage().nbytes()
            t.untyped_storage().resize_(0)
            junk.append(torch.full_like(kept, 7))
            t.untyped_storage().resize_(size)
            t.untyped_storage().copy_(kept.untyped_storage())

        def replace(t):
            t.data = torch.zeros_like(t)

        junk = []
        for keeps in (False, True):
            x = make_input(device)
            hidden = x * 1
            module.zero_grad()
            module(hidden).square().sum().backward()
            want = gradients(module, x)
            for change in (move, refill, replace):
                x = make_input(device)
                hidden = x * 1
                y = module(hidden)
                for last in (False, True) if keeps else (True,):
                    change(hidden)
                    module.zero_grad()
                    x.grad = None
                    y.square().sum().backward(retain_graph=not last)
                    if change is not replace or device == "cpu":
                        self.same(gradients(module, x), want, change.__name__)
        for change in (free, shrink):
            x = make_input(device)
            hidden = x * 1
            y = module(hidden)
            change(hidden)
            for _ in range(2):
                with self.assertRaisesRegex(FailedPrecondition, "the memory of 'input' has been freed or replaced since the forward"):
                    y.sum().backward(retain_graph=True)
        module.zero_grad()
        module(make_input(device)).sum().backward()

    def test_every_tensor_of_a_call_may_be_emptied_and_refilled(self):
        """Empties arguments, parameters and outputs. A tensor that is not refilled is either refused or was not needed."""
        def empty(t, junk):
            kept = t.untyped_storage().clone()
            t.untyped_storage().resize_(0)
            junk += [torch.full((kept.nbytes(),), 7, dtype=torch.uint8) for _ in range(3)]
            return kept

        for recipe in (None, Float8CurrentScaling()):
            for name, (module, arguments, call) in calls().items():
                fixed = [n for n, p in module.named_parameters() if not p.untyped_storage().resizable()]  # parameters that are views of one array
                                                                                                          # cannot be resized

                def run(changed=None, refills=True):
                    module.zero_grad()
                    copies, junk = {n: t.detach().clone().requires_grad_(t.requires_grad) for n, t in arguments.items()}, []
                    with scope(recipe):
                        outputs = call(module, **copies)
                    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                    weights = [randn(*y.shape, seed=i) for i, y in enumerate(outputs)]
                    all_tensors = {**copies, **dict(module.named_parameters()), **{f"output {i}": y for i, y in enumerate(outputs)}}
                    if changed is not None:
                        t = all_tensors[changed]
                        kept = empty(t, junk)
                        if refills:
                            t.untyped_storage().resize_(kept.nbytes())
                            t.untyped_storage().copy_(kept)
                    try:
                        torch.autograd.backward(outputs, weights)
                    finally:
                        if changed is not None and not refills:
                            t.untyped_storage().resize_(kept.nbytes())
                            t.untyped_storage().copy_(kept)
                    found = {n: t.grad for n, t in {**copies, **dict(module.named_parameters())}.items() if t.grad is not None}
                    return found, list(all_tensors)
                want, names = run()
                self.assertTrue(want)
                for changed in (n for n in names if n not in fixed):
                    for refills in (True, False):
                        with self.subTest(call=name, recipe=type(recipe).__name__, changed=changed, refills=refills):
                            try:
                                got, _ = run(changed, refills)
                            except RuntimeError as error:
                                self.assertFalse(refills, error)
                                # InvalidArgument, because the tensor has no memory
                                self.assertIsInstance(error, (FailedPrecondition, te_fl.errors.InvalidArgument))
                                continue
                            self.same(list(got.values()), list(want.values()))

    def test_what_the_backward_does_not_read_may_go(self):
        # In FP8 a Linear keeps its quantised input for the backward, and not the input itself.
        module, x = randomise(te.Linear(32, 32, device="cpu")), make_input()
        with scope(Float8CurrentScaling()):
            module(x).sum().backward()
        want = gradients(module, x)
        module.zero_grad()
        x = make_input()
        hidden = x * 1
        with scope(Float8CurrentScaling()):
            y = module(hidden)
        hidden.untyped_storage().resize_(0)
        y.sum().backward()
        self.same(gradients(module, x), want)

    def attention(self, **arguments):
        return te.DotProductAttention(4, 8, attention_dropout=0.0, qkv_format="bshd", **arguments), randn(2, 6, 4, 8).requires_grad_()

    def test_a_backward_that_is_refused_leaves_the_next_one_right(self):
        """A backward is refused if the program has moved one input's storage and emptied another's. After the program fills that storage again, the next
        backward is right."""
        for node in ("q", "k", "v"):
            grads = []
            for moves in (False, True):
                module, q = self.attention()
                inputs = {n: (q.detach() * (i + 1)).requires_grad_() for i, n in enumerate("qkv")}
                own = {n: t * 1 for n, t in inputs.items()}
                y = module(*own.values())
                kept = {n: t.untyped_storage().clone() for n, t in own.items()}
                if moves:
                    for t in own.values():
                        t.untyped_storage().resize_(0)
                    junk = [torch.full_like(q, 7) for _ in range(9)]
                    for n in own:
                        if n != node:
                            own[n].untyped_storage().resize_(kept[n].nbytes()).copy_(kept[n])
                    with self.assertRaisesRegex(FailedPrecondition, "the memory of 'input' has been freed"):
                        y.square().sum().backward()
                    own[node].untyped_storage().resize_(kept[node].nbytes()).copy_(kept[node])
                    junk += [torch.full_like(q, 7) for _ in range(9)]
                y.square().sum().backward()
                grads.append([t.grad for t in inputs.values()])
            self.same(*grads, node)

    def test_memory_that_lies_where_an_emptied_input_lay(self):
        """If other activations now lie at the address of an emptied input, refilling the input elsewhere must not move them."""
        module, grads = randomise(te.LayerNormMLP(32, 64, device="cpu")), []
        for moves in (False, True):
            saved = []
            memory = torch.empty(10_000_000)  # 40 MB, which the allocator returns to the system; the next allocation often gets the same address
            x = memory[:512].view(16, 32).copy_(randn(16, 32)).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # noqa: B023
                y = module(x)
            if moves:
                token = next(t for t in saved if t.dtype is torch.int64)
                own = [m for m, storage in _native.saved_memory(token) if storage is None]
                self.assertTrue(own)
                values, address = x.detach().clone(), memory.data_ptr()
                memory.untyped_storage().resize_(0)
                several = [torch.empty(10_000_000) for _ in range(16)]
                other = next((t for t in several if t.data_ptr() == address), None)
                if other is None:
                    self.skipTest("the allocator gave other memory")
                at, moved = 0, []
                for m in own:
                    to = other.view(torch.uint8)[at:at + m.numel()].copy_(m)
                    moved.append((m.data_ptr(), m.numel(), to))
                    at += -(-m.numel() // 64) * 64
                    self.assertLessEqual(m.numel(), 40_000_000)
                _native.move_saved_memory(token, tuple(moved))
                memory.untyped_storage().resize_(40_000_000)
                with torch.no_grad():
                    x.data.copy_(values)
            module.zero_grad()
            y.square().sum().backward()
            grads.append(gradients(module, x))
        self.same(*grads)

    def test_a_mask_written_before_the_backward(self):
        module, q = self.attention(attn_mask_type="arbitrary")
        mask = randn(1, 1, 6, 6, seed=3) > 1
        y = module(q, q, q, attention_mask=mask)
        mask.fill_(False)
        with self.assertRaisesRegex(RuntimeError, "inplace|in place|in-place"):
            y.sum().backward()

    def test_lengths_written_before_the_backward(self):
        module = te.DotProductAttention(4, 8, attention_dropout=0.0, qkv_format="thd", attn_mask_type="padding_causal")
        q, lengths = randn(6, 4, 8).requires_grad_(), torch.tensor([0, 2, 6], dtype=torch.int32)
        arguments = dict(cu_seqlens_q=lengths, cu_seqlens_kv=lengths, max_seqlen_q=4, max_seqlen_kv=4)
        module(q, q, q, **arguments).square().sum().backward()
        y = module(q, q, q, **arguments)
        lengths[1] = 3
        with self.assertRaisesRegex(RuntimeError, "inplace|in place|in-place"):
            y.sum().backward()

    def test_what_was_made_in_inference_mode_trains(self):
        # PyTorch cannot save such a tensor for a backward, and code outside of inference mode must not write to it.
        for arguments in (dict(attn_mask_type="causal"), dict(attn_mask_type="arbitrary")):
            module, q = self.attention(**arguments)
            call = dict(core_attention_bias_type="alibi") if arguments["attn_mask_type"] == "causal" else {}
            with torch.inference_mode():
                if not call:
                    call["attention_mask"] = torch.zeros(1, 1, 6, 6, dtype=torch.bool)
                want = module(q, q, q, **call).clone()
            y = module(q, q, q, **call)
            self.assertTrue(torch.equal(y, want))
            y.sum().backward()
            self.assertTrue(torch.isfinite(q.grad).all())

    def test_a_bias_whose_memory_goes(self):
        module, q = self.attention(attn_mask_type="no_mask")
        bias = randn(1, 4, 6, 6, seed=3)
        y = module(q, q, q, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
        bias.untyped_storage().resize_(0)
        with self.assertRaisesRegex(FailedPrecondition, "the memory of 'bias' has been freed or replaced"):
            y.sum().backward()


class Quantising(torch.utils.data.Dataset):
    """A dataset whose items a module computes on access."""

    def __init__(self, module, backward):
        self.module, self.backward = module, backward

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = make_input(seed=index)
        with scope(Float8CurrentScaling()):
            y = self.module(x)
        if self.backward:
            y.square().sum().backward()
            return x.grad
        return y.detach()


def library_that_waits(pid):
    """Returns the file name of the library that contains the process's innermost function outside of the C library, if the process waits for a lock;
    else None."""
    with open(f"/proc/{pid}/syscall") as file:
        call = file.read().split()
    if call[0] not in ("202", "98"):  # system call number of futex on x86-64 and on aarch64
        return None
    code = []  # (begin, end, library)
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            area, rights, *_, path = line.split(maxsplit=5) if "/" in line else (*line.split()[:2], "")
            if "x" in rights:
                code.append((*(int(n, 16) for n in area.split("-")), os.path.basename(path.strip())))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(int(call[7], 16))  # searches the stack for return addresses
        words = struct.unpack("128Q", memory.read(1024))
    found = (library for word in words for begin, end, library in code if begin <= word < end)
    return next((library for library in found if not library.startswith(("libc.", "libc-", "ld-", "libpthread"))), None)


class Workers(unittest.TestCase):
    def test_items_of_forked_workers(self):
        module = randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu")).requires_grad_(False)
        # After a backward on a GPU, PyTorch itself refuses a backward in a forked child.
        for backward in (False,) if torch.cuda.is_available() else (False, True):
            data = Quantising(module, backward)
            want = [data[i] for i in range(len(data))]  # starts this process's thread pools
            loader = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=120)
            with self.subTest(backward=backward):
                got = list(loader)
                self.assertEqual(len(got), len(want))
                self.assertTrue(all(torch.equal(g, w) for g, w in zip(got, want)))
            self.assertTrue(torch.equal(data[0], want[0]))  # this process continues to work


    def wait_for_end(self, child):
        """Returns the child's exit code, or "PyTorch's lock" if it hung in a lock of PyTorch's."""
        begun = time.monotonic()
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() - begun > 10 and (library_that_waits(child) or "").startswith(("libtorch", "libc10")):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "PyTorch's lock"
            time.sleep(0.01)

    def test_forks_while_threads_are_in_calls(self):
        """A forked child calls the layer that another thread of its parent was in, other layers, and the backward passes of earlier forwards.

        PyTorch has locks of its own that may be held for ever in a child (of an AccumulateGrad in use by another thread, of the list of
        at::RecordFunction's callbacks). Such hangs happen now and then and do not concern te-fl; they are counted separately."""
        def step(module, recipe):
            x = make_input()
            with scope(recipe):
                y = module(x)
            y.square().sum().backward()
            return [y.detach(), x.grad]

        recipes = (None, Float8CurrentScaling())
        shared = [randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu")), randomise(te.Linear(32, 32, device="cpu")),
                  randomise(te.Linear(32, 32, device="cpu", delay_wgrad_compute=True))]
        for module in shared:
            module.requires_grad_(False)
        shared[2].requires_grad_(True)
        pairs = list(itertools.product(shared, recipes))
        want = [step(*pair) for pair in pairs]
        stop, errors = threading.Event(), []

        def work(pair):
            try:
                while not stop.is_set():
                    step(*pair)
                    if pair[0] is shared[2]:
                        pair[0].backward_dw()
                        pair[0].state_dict()
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(pair,), daemon=True) for pair in pairs]
        for thread in threads:
            thread.start()
        children, ends = [], []
        try:
            for _ in range(24):
                pid = os.fork()
                if pid == 0:
                    signal.alarm(40)  # kills a hanging child by the signal's default action
                    code = 1
                    try:
                        got = [step(*pair) for pair in pairs for _ in range(2)]
                        code = 0 if all(torch.equal(a, b) for i, g in enumerate(got) for a, b in zip(g, want[i // 2])) else 3
                    finally:
                        os._exit(code)
                children.append(pid)
                if len(children) % 4 == 0:
                    ends += [self.wait_for_end(child) for child in children[-4:]]
                    self.assertEqual([e for e in ends if e not in (0, "PyTorch's lock")], [], "-14: the child hung; 3: it computed something else")
            self.assertGreater(ends.count(0), 20, ends)
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        self.assertEqual(errors, [])


class _Stop:
    """A trace function that raises KeyboardInterrupt at the n-th traced line or call in te-fl's files (or in those whose path contains `part`), or at
    the n-th instruction if Python traces instructions (3.12 does not always)."""

    def __init__(self, number, instructions, part):
        self.number, self.instructions, self.part, self.where = number, instructions, f"{os.sep}te_fl{os.sep}{part}", None

    def __call__(self, frame, event, argument):
        # Python swallows an exception that is raised while a generator is closed, so do not raise there.
        if self.part not in frame.f_code.co_filename or frame.f_code.co_name.startswith("<"):
            return None
        frame.f_trace_opcodes = self.instructions
        if event in ("call", "line", "opcode"):
            self.number -= 1
            if self.number == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self


class Interrupts(Each):
    def points(self, function, instructions=False, part=""):
        """Yields each place at which KeyboardInterrupt was raised while the function ran."""
        number = 0
        while True:
            number += 1
            stop = _Stop(number, instructions, part)
            try:
                sys.settrace(stop)
                function()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            if stop.where is None:
                self.assertGreater(number, 10)  # proves that the function was traced
                return
            yield stop.where

    def test_at_every_line_of_a_step(self):
        modules = [randomise(te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu")),
                   randomise(te.Linear(32, 32, device="cpu"))]

        def step(recipe=Float8CurrentScaling()):
            x = make_input()
            with te_fl.policy(prefer="flagos"), scope(recipe):
                y = modules[1](te.checkpoint(modules[0], x))
            y.sum().backward()
            return [y.detach(), x.grad]

        want, high, text = step(), step(None), te_fl.policy_text()
        for where in self.points(step):
            done = []
            thread = threading.Thread(target=lambda: done.append(step()), daemon=True)
            thread.start()
            thread.join(30)
            self.assertTrue(done, f"another thread waits or fails after {where}")
            self.same(done[0], want, where)
            self.assertEqual(te_fl.policy_text(), text, where)
            x = make_input()
            y = modules[1](modules[0](x))  # outside of an autocast: checks that none is left open
            y.sum().backward()
            self.same([y.detach(), x.grad], high, where)
            self.same(step(), want, where)

    # If a forward fails in a backward, PyTorch's generator removes hooks that are already removed when it is collected.
    @unittest.mock.patch.object(sys, "unraisablehook", lambda _: None)
    def test_at_every_line_of_pytorchs_checkpoints(self):
        """After an interrupt no record is left open, and PyTorch's saved-tensor hooks are as before."""
        hooks = saved_hooks.top
        outer, inner = (randomise(te.Linear(32, 32, device="cpu"), seed) for seed in (1, 2))
        checkpoint, recipe = torch.utils.checkpoint.checkpoint, Float8CurrentScaling()
        ways = {"hooks": functools.partial(checkpoint, use_reentrant=False), "reentrant": functools.partial(checkpoint, use_reentrant=True),
                "te.checkpoint": te.checkpoint}
        for first, second in (("hooks", "te.checkpoint"), ("te.checkpoint", "reentrant"), ("reentrant", "hooks")):
            def step():
                x = make_input()
                with scope(recipe):
                    y = ways[first](lambda t: outer(ways[second](inner, t)), x)
                y.sum().backward()
                return [y.detach(), x.grad]

            want = step()
            for where in self.points(step, part=os.path.join("pytorch", "autograd", "")):
                self.assertIsNone(hooks(False), where)
                self.same(step(), want, f"{first} around {second}: {where}")

    def test_at_every_line_of_a_first_forward(self):
        # An object whose construction is interrupted is complete or absent, and so is loaded FP8 state.
        recipe = Float8CurrentScaling()
        for make in (lambda: te.TransformerLayer(32, 64, 4, hidden_dropout=0, attention_dropout=0, device="cpu"),
                     lambda: te.LayerNormLinear(32, 32, device="cpu", delay_wgrad_compute=True)):
            trained, x = randomise(make()), make_input().detach()
            with scope(DelayedScaling(amax_history_len=2)):
                trained(x)
            state, modules = trained.state_dict(), []

            def first():
                with scope(recipe):
                    return modules[-1](x)

            def fresh():
                modules[:] = [make()]
                modules[-1].load_state_dict(state)
            fresh()
            want = first()
            fresh()
            for where in self.points(first):
                for part in modules[-1].modules():
                    fused = [getattr(part, "_fused", None), *getattr(part, "_fused_in", ())]
                    if hasattr(part, "_loaded") and (part._layers or any(layer is not None and layer._layers for layer in fused)):
                        self.assertEqual(part._loaded, [], where)
                self.same([first()], [want], where)
                fresh()

    def test_at_every_instruction_of_the_scopes(self):
        module, x = randomise(te.Linear(32, 32, device="cpu")).requires_grad_(False), make_input().detach()
        want, text = module(x), te_fl.policy_text()

        def scopes():
            with te.autocast(recipe=Float8CurrentScaling()):
                with te_fl.policy(prefer="reference"):
                    module(x)

        for where in self.points(scopes, instructions=True):
            self.assertEqual(te_fl.policy_text(), text, where)
            self.assertTrue(torch.equal(module(x), want), where)

    def test_signals(self):
        program = """
import os, signal, threading, torch
import te_fl.pytorch as te
from te_fl.common.recipe import DelayedScaling
module = te.TransformerLayer(64, 256, 4, device="cpu")
optimizer = te.optimizers.FusedAdam(module.parameters())
def step():
    with te.autocast(recipe=DelayedScaling()):
        y = module(torch.ones(16, 2, 64))
    y.square().mean().backward()
    optimizer.step()
step()
for i in range(25):
    timer = threading.Timer(0.004 + 0.0013 * i, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        for _ in range(400):  # Python drops an interrupt that comes inside a callback of a weak reference
            step()
    except KeyboardInterrupt:
        torch.set_grad_enabled(True)  # PyTorch's own no_grad() leaves it off if the interrupt comes inside its __enter__()
    timer.join()
    step()
print("goes on")
"""
        done = subprocess.run([*PYTHON, "-c", program], capture_output=True, text=True, timeout=120)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "goes on"), done.stderr)


class Imports(unittest.TestCase):
    USE = """
import te_fl.pytorch as te
from te_fl.common.recipe import Float8CurrentScaling
import sys, torch
x = torch.ones(16, 16, requires_grad=True)
module = te.Linear(16, 16, device="cpu")
with te.autocast(recipe=Float8CurrentScaling()):
    module(x).sum().backward()
assert torch.allclose(x.grad, module.weight.detach().sum(0).expand(16, 16), rtol=0.1, atol=0.02)
if "jax" in sys.modules:
    import jax, jax.numpy as jnp, te_fl.jax as tj
    y = jax.jit(lambda x: tj.ops.relu(input=x))(jnp.arange(-2.0, 3.0))
    assert y.tolist() == [0, 0, 0, 1, 2], y
assert "transformer_engine" not in sys.modules
"""

    def test_any_order_beside_nvidias_package(self):
        try:
            import jax
            names = ("torch", jax.__name__, "te_fl")
        except ModuleNotFoundError:
            names = ("torch", "te_fl")
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "transformer_engine")
            package.mkdir()
            (package / "__init__.py").write_text("raise ImportError('as without a GPU')\n")
            path = folder + os.pathsep + os.environ.get("PYTHONPATH", "")
            for order in itertools.permutations(names):
                with self.subTest(order=order):
                    program = "".join(f"import {name}\n" for name in order) + self.USE
                    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180,
                                          env={**os.environ, "PYTHONPATH": path})
                    self.assertEqual(done.returncode, 0, done.stderr)


class SharedScopes(unittest.TestCase):
    def test_autocast_is_made_anew_where_it_differs(self):
        recipe = DelayedScaling()
        made = te.autocast(recipe=recipe)
        self.assertIs(te.autocast(recipe=recipe), made)
        for options in ({"recipe": DelayedScaling()}, {}, {"enabled": False, "recipe": recipe}, {"enabled": False, "calibrating": True, "recipe": recipe}):
            self.assertIsNot(te.autocast(**options), made)
        made = te.autocast(recipe=recipe)
        recipe.margin = 1  # changes the recipe that autocasts use from now on
        self.assertIsNot(te.autocast(recipe=recipe), made)
        other = []
        thread = threading.Thread(target=lambda: other.append(te.autocast(recipe=recipe)))
        thread.start()
        thread.join()
        self.assertIsNot(te.autocast(recipe=recipe), other[0])

    def test_one_autocast_inside_of_itself(self):
        layer, x = te.Linear(32, 32, device="cpu"), randn(16, 32)
        with torch.no_grad():
            plain = layer(x)
            with te.autocast(recipe=Float8CurrentScaling()):
                with te.autocast(recipe=Float8CurrentScaling()):
                    pass
                self.assertFalse(torch.equal(layer(x), plain))
            self.assertTrue(torch.equal(layer(x), plain))

    def test_one_autocast_in_two_threads(self):
        """Each thread exits the autocast that it entered: the first exit does not end the other thread's."""
        layer, x = te.Linear(32, 32, device="cpu"), randn(16, 32)
        with torch.no_grad():
            plain = layer(x)
            with te.autocast(recipe=Float8CurrentScaling()):
                quantised = layer(x)
            self.assertFalse(torch.equal(plain, quantised))
            scope, step, found = te.autocast(recipe=Float8CurrentScaling()), threading.Barrier(2, timeout=60), {}

            def work(leaves_first):
                with torch.no_grad():
                    with scope:
                        step.wait()
                        if not leaves_first:
                            step.wait()
                            found["inside"] = layer(x)
                    if leaves_first:
                        found["outside"] = layer(x)
                        step.wait()
                    else:
                        found["after"] = layer(x)

            threads = [threading.Thread(target=work, args=(first,)) for first in (True, False)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(set(found), {"inside", "outside", "after"})
        self.assertTrue(torch.equal(found["inside"], quantised))
        self.assertTrue(torch.equal(found["outside"], plain))
        self.assertTrue(torch.equal(found["after"], plain))

    def test_scopes_left_in_another_order(self):
        outer, inner = te.autocast(recipe=Float8CurrentScaling()), te.autocast(enabled=False)
        outer.__enter__()
        inner.__enter__()
        outer.__exit__(None, None, None)
        self.assertFalse(te.FP8GlobalStateManager.is_fp8_enabled())
        inner.__exit__(None, None, None)
        self.assertIsNone(quantization.active_recipe())

    def test_what_autocast_chose_is_not_shared(self):
        with te.autocast():
            te.FP8GlobalStateManager.get_fp8_recipe().margin = 5
        with te.autocast():
            self.assertEqual(te.FP8GlobalStateManager.get_fp8_recipe().margin, 0)


if __name__ == "__main__":
    unittest.main()
