"""cuattn.transformers: models compute, train and generate what they do with the attention of PyTorch."""

import copy

import ml_dtypes
import pytest

import cuattn

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

import cuattn.transformers  # noqa: E402
from cuattn.transformers import make_mask  # noqa: E402
from tests.tolerances import assert_close  # noqa: E402

cuattn.transformers.register()

BATCH, LENGTH = 2, 12
SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
DECODER = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "llama": ("Llama", DECODER),
    "gemma2": ("Gemma2", {**DECODER, "head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0}),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 5}),
    "bert": ("Bert", SMALL),
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
OTHERS = {  # attention sinks; chunks; values that are smaller than keys; biases of positions
    "gpt_oss": ("GptOss", {**DECODER, **EXPERTS, "head_dim": 8, "sliding_window": 4}),
    "llama4": ("Llama4", {**DECODER, **EXPERTS, "head_dim": 8, "attention_chunk_size": 4, "intermediate_size_mlp": 48}),
    "deepseek": ("DeepseekV3", {
        **SMALL, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 2,
    }),
    "t5": ("T5", {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}  # fmt: skip
decoders = pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])


def models(name, **changes):
    """Return a tiny model of random weights twice: with the attention of Transformers, and with ours."""
    kind, settings = {**CONFIGS, **OTHERS}[name]
    made = getattr(transformers, f"{kind}TextConfig" if name == "llama4" else f"{kind}Config")
    config = made(**{**settings, **changes})
    known = "eager" if name in ("gemma2", *OTHERS) else "sdpa"  # which has no softcap
    torch.manual_seed(0)
    config._attn_implementation = known
    head = {"bert": "MaskedLM", "t5": "ConditionalGeneration"}.get(name, "CausalLM")
    theirs = getattr(transformers, f"{kind}For{head}")(config).eval()
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation("cuattn")
    assert (theirs.config._attn_implementation, ours.config._attn_implementation) == (known, "cuattn")
    return theirs, ours


def tokens(batch=BATCH, length=LENGTH):
    return torch.randint(1, 40, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side, length=LENGTH):
    mask = torch.ones(BATCH, length, dtype=torch.long)
    if side == "left":
        mask[0, :4] = 0
    elif side == "right":
        mask[1, 7:] = 0
    return mask


def assert_equal(theirs, ours, at=None):
    """Logits agree to 1e-5, as issue 19 asks, where tokens are `at`."""
    at = torch.ones(theirs.shape[:2]) if at is None else at
    torch.testing.assert_close(ours[at.bool()], theirs[at.bool()], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
@pytest.mark.parametrize("side", [None, "none", "left", "right"])
def test_models_agree(name, side):
    theirs, ours = models(name)
    at = None if side is None else padded(side)
    given = {"attention_mask": at} | ({"decoder_input_ids": tokens()} if name == "t5" else {})
    with torch.no_grad():
        assert_equal(theirs(tokens(), **given).logits, ours(tokens(), **given).logits, at)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_compiled_models_agree(name):
    theirs, ours = models(name)
    compiled, at = torch.compile(ours, backend="aot_eager"), padded("left")
    with torch.no_grad():
        assert_equal(theirs(tokens(), attention_mask=at).logits, compiled(tokens(), attention_mask=at).logits, at)


def test_padding_counts():
    """What registering the attention alone, without the masks, would lose."""
    _, ours = models("llama")
    with torch.no_grad():
        at = padded("left")
        assert (ours(tokens()).logits - ours(tokens(), attention_mask=at).logits)[0, 4:].abs().max() > 1e-3


@decoders
def test_packed_sequences_are_those_alone(name):
    theirs, ours = models(name)
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None].expand(BATCH, -1)
    with torch.no_grad():
        packed = ours(tokens(), position_ids=positions, use_cache=False).logits
        assert_equal(theirs(tokens(), position_ids=positions, use_cache=False).logits, packed)
        assert_equal(ours(tokens()[:, 7:]).logits, packed[:, 7:])


@pytest.mark.parametrize("name", CONFIGS)
def test_training_steps_agree(name):
    at = padded("right")
    gradients = []
    for model in models(name):
        model.train()
        for module in model.modules():  # so that they are deterministic
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            module.__dict__.pop("dropout_prob", None)
        model.config.attention_dropout = 0.0
        labels = tokens().masked_fill(at == 0, -100)
        model(tokens(), attention_mask=at, labels=labels).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    theirs, ours = gradients
    for name, gradient in theirs.items():
        if gradient is not None:
            torch.testing.assert_close(ours[name], gradient, atol=1e-5, rtol=1e-4)


def test_dropout_in_training():
    """The expectation over seeds is the value without; a seed gives the same again; none in evaluation."""
    _, ours = models("llama", attention_dropout=0.3)
    plain = ours(tokens()).logits
    ours.train()
    torch.manual_seed(3)
    first = ours(tokens()).logits
    assert not torch.allclose(first, plain, atol=1e-4)
    torch.manual_seed(3)
    torch.testing.assert_close(ours(tokens()).logits, first, atol=0, rtol=0)
    ours.gradient_checkpointing_enable()
    torch.manual_seed(3)
    ours(tokens()).logits.sum().backward()


@decoders
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_agrees(name, side, cache):
    theirs, ours = models(name)
    found = [
        model.generate(
            tokens(length=6), attention_mask=padded(side, 6), max_new_tokens=8, do_sample=False, disable_compile=True,
            cache_implementation=cache, output_logits=True, return_dict_in_generate=True,
        )
        for model in (theirs, ours)
    ]  # fmt: skip
    assert (found[0].sequences == found[1].sequences).all()
    assert_equal(*[torch.stack(one.logits, 1) for one in found])


def test_a_prefill_in_pieces():
    theirs, ours = models("mistral")
    logits = []
    for model in (theirs, ours):
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            logits.append(torch.cat([model(x, past_key_values=cache).logits for x in tokens().split([5, 4, 3], 1)], 1))
    assert_equal(*logits)


@pytest.mark.parametrize("floats", [False, True])
def test_matrices_of_the_user(floats):
    theirs, ours = models("llama")
    visible = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(2)) < 0.5
    visible |= torch.eye(LENGTH, dtype=torch.bool)
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min) if floats else visible
    with torch.no_grad():
        assert_equal(theirs(tokens(), attention_mask=mask).logits, ours(tokens(), attention_mask=mask).logits)


FUNCTIONS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "band": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([3, 0])),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize(("offset", "rows"), [(0, LENGTH), (LENGTH - 4, 4)])
def test_masks_are_those_of_transformers(kind, side, offset, rows):
    given = {
        "batch_size": BATCH, "q_length": rows, "kv_length": LENGTH, "q_offset": offset,
        "mask_function": FUNCTIONS[kind], "attention_mask": side and padded(side).bool(), "allow_is_causal_skip": False,
    }  # fmt: skip
    mask, known = make_mask(**given), masking_utils.sdpa_mask(**given)
    assert mask.shape == known.shape
    assert (torch.from_numpy(mask.mask.dense()).expand(known.shape) == known).all()
    assert (make_mask(**given).mask is mask.mask) == (
        side is None and kind != "chunks"
    )  # which keeps its tables on a GPU


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_masks_of_packed_sequences(kind):
    positions = torch.tensor([[*range(4), *range(3), *range(5)], [*range(2), *range(10)]])
    sequences = masking_utils.find_packed_sequence_indices(positions)
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        function = masking_utils.packed_sequence_compatibility_function(FUNCTIONS[kind], positions, sequences)
    else:
        same = masking_utils.packed_sequence_mask_function(sequences)
        function = masking_utils.and_masks(FUNCTIONS[kind], same)
    given = {"batch_size": BATCH, "q_length": LENGTH, "kv_length": LENGTH, "mask_function": function}
    mask = make_mask(**given, allow_is_causal_skip=False).mask
    known = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    assert (torch.from_numpy(mask.dense()).expand(known.shape) == known).all()


def test_other_functions_become_matrices():
    """And those of one row."""
    blocks = masking_utils.blockwise_overlay(torch.tensor([[0, 0, -1, -1, 1, 1]] * BATCH))
    function = masking_utils.or_masks(masking_utils.causal_mask_function, blocks)
    given = {"batch_size": BATCH, "q_length": 6, "kv_length": 6, "mask_function": function}
    given["allow_is_causal_skip"] = False
    assert (make_mask(**given) == masking_utils.sdpa_mask(**given)).all()
    given |= {"q_offset": 2, "q_length": 1, "mask_function": masking_utils.causal_mask_function}
    assert (make_mask(**given) == masking_utils.sdpa_mask(**given)).all()


def test_sinks_and_biases():
    """Of one layer, against the textbook."""
    q, k, v = torch.randn(3, BATCH, 4, LENGTH, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sinks, bias = torch.linspace(-1, 1, 4, dtype=torch.float64), torch.eye(LENGTH, dtype=torch.float64)[None, None]
    layer = torch.nn.Module()
    layer.is_causal = False
    o, weights = cuattn.transformers.attend(layer, q, k, v, None, scaling=0.3, position_bias=bias, s_aux=sinks)
    scores = 0.3 * q @ k.mT + bias
    wide = torch.cat([scores, sinks[:, None, None].expand(BATCH, 4, LENGTH, 1)], -1).softmax(-1)
    torch.testing.assert_close(o, (wide[..., :-1] @ v).transpose(1, 2))
    assert weights is None


def test_what_is_not_supported_says_so():
    with pytest.raises(cuattn.DtypeError, match="name is 3; expected a string"):
        cuattn.transformers.register(3)
    layer, x = torch.nn.Module(), torch.zeros(1, 1, 2, 4)
    with pytest.raises(cuattn.UnsupportedError, match="output_attentions is True"):
        cuattn.transformers.attend(layer, x, x, x, None, output_attentions=True)
    with pytest.raises(cuattn.UnsupportedError, match="cache is object; expected no paged cache"):
        cuattn.transformers.attend(layer, x, x, x, None, cache=object())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_gpu_bfloat16(name, side):
    """Values and gradients on a GPU are as close to float32's on the CPU as those of PyTorch's attention."""
    size = {"hidden_size": 128, "intermediate_size": 128}
    exact, _ = models(name, **size, **({"head_dim": 32} if name == "gemma2" else {}))
    low = [copy.deepcopy(exact).to("cuda", torch.bfloat16) for _ in range(2)]
    low[1].set_attn_implementation("cuattn")
    x, at = tokens(), padded(side)
    labels = x.masked_fill(at * at.roll(1, 1) == 0, -100)  # none that a row of padding predicts
    found = []
    for model in (exact, *low):
        given = {
            "attention_mask": side and at.to(model.device),
            "labels": labels.to(model.device),
        }
        results = model(x.to(model.device), **given)
        results.loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found.append([results.logits.detach()[at.bool()], *gradients])
    for known, theirs, ours in zip(*[[x.float().cpu().numpy() for x in arrays] for arrays in found], strict=True):
        assert_close(ours, known, theirs, dtype=ml_dtypes.bfloat16)


@pytest.mark.gpu
@decoders
def test_gpu_generation(name):
    """Padded and cached, in float32, where the tokens are those of PyTorch's attention."""
    theirs, ours = (model.to("cuda") for model in models(name))
    given = {"attention_mask": padded("left", 6).cuda(), "max_new_tokens": 8, "do_sample": False}
    known, found = (model.generate(tokens(length=6).cuda(), **given) for model in (theirs, ours))
    assert (found == known).all()


@pytest.mark.gpu
def test_gpu_packed_sequences():
    theirs, ours = (model.to("cuda") for model in models("mistral"))
    positions = torch.cat([torch.arange(7), torch.arange(5)])[None].expand(BATCH, -1).cuda()
    with torch.no_grad():
        given = {"position_ids": positions, "use_cache": False}
        assert_equal(theirs(tokens().cuda(), **given).logits, ours(tokens().cuda(), **given).logits)
