"""Row- and column-parallel products under jit: values, gradients, and what the compiled program sends on which axis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from meshes import P, mesh

import taco_jax
from experiments.communication import planned_collectives, read_collectives
from taco_jax import Codec, Compression, column_parallel, row_parallel
from taco_jax.scales import COUNT

BATCH, LENGTH, HIDDEN, HEADS, SIZE, WIDE = 16, 64, 64, 4, 16, 256
RANKS, REPLICAS = 4, 2
LOCAL = BATCH // REPLICAS * LENGTH * HIDDEN
"""Values of one device's message."""
BLOCK_BYTES = LOCAL + 2 * LOCAL // 128
"""One byte a value and a bf16 scale per 128."""
ADAPTIVE = Compression(*[Codec(scale="adaptive")] * 2)
"""Without the transform, which is slow to compile and has no part in what is tested with it."""


def weights():
    rng = np.random.default_rng(0)
    shapes = {
        "query": (HIDDEN, HEADS, SIZE), "value": (HIDDEN, HEADS, SIZE), "out": (HEADS, SIZE, HIDDEN),
        "up": (HIDDEN, WIDE), "down": (WIDE, HIDDEN),
    }  # fmt: skip
    parameters = {name: rng.standard_normal(shape, np.float32) / 8 for name, shape in shapes.items()}
    return parameters, rng.standard_normal((BATCH, LENGTH, HIDDEN), np.float32)


def specs():
    columns, rows = P(None, "tp"), P("tp")
    return {"query": columns, "value": columns, "out": rows, "up": columns, "down": rows}


def placed(on):
    parameters, x = weights()
    put = {name: jax.device_put(parameters[name], NamedSharding(on, spec)) for name, spec in specs().items()}
    return put, jax.device_put(x, NamedSharding(on, P("dp")))


def layers(parameters, x, column, row):
    """Two layers whose kernels have two and three axes; the first shares one input between two kernels."""
    query, value = column(x, (parameters["query"], parameters["value"]), "attention")
    x = x + row(jax.nn.sigmoid(query) * value, parameters["out"], "attention")
    return x + row(jax.nn.gelu(column(x, parameters["up"], "mlp")), parameters["down"], "mlp")


def plain(parameters, x):
    def column(x, kernel, name):
        return jax.tree.map(lambda leaf: jnp.tensordot(x, leaf, 1), kernel)

    y = layers(parameters, x, column, lambda x, kernel, name: jnp.tensordot(x, kernel, kernel.ndim - 1))
    return jnp.mean(jnp.square(y)), y


def wrapped(compression, scales=None, **options):
    def call(one):
        def layer(x, kernel, name):
            site = None if scales is None else scales[name]
            return one(x, kernel, compression=compression, scales=site, name=name, **options)

        return layer

    def model(parameters, x):
        y = layers(parameters, x, call(column_parallel), call(row_parallel))
        return jnp.mean(jnp.square(y)), y

    return model


def value_and_gradients(model):
    return jax.value_and_grad(model, (0, 1), has_aux=True)


def differences(got, want):
    """Relative L2 error and cosine of each tensor."""
    found = {}
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        error = np.linalg.norm(a - b) / np.linalg.norm(b)
        found[jax.tree_util.keystr(path)] = (error, np.vdot(a, b) / np.linalg.norm(a) / np.linalg.norm(b))
    return found


@pytest.fixture(scope="module")
def reference():
    return jax.jit(value_and_gradients(plain))(*weights())


def sent(compiled):
    return read_collectives(compiled.as_text(), {"dp": REPLICAS, "tp": RANKS})


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_without_compression_it_is_the_plain_model(kind, reference):
    on = jax.make_mesh((REPLICAS, RANKS), ("dp", "tp"), axis_types=(kind, kind))
    with jax.set_mesh(on):
        got = jax.jit(value_and_gradients(wrapped(None, batch_spec=P("dp"))))(*placed(on))
    for tensor, (error, _) in differences(got, reference).items():
        assert error < 1e-6, tensor


@pytest.fixture(scope="module")
def compressed():
    on = mesh(dp=REPLICAS, tp=RANKS)
    step = jax.jit(value_and_gradients(wrapped("taco_block", batch_spec=P("dp"), mesh=on)))
    arguments = placed(on)
    compiled = step.lower(*arguments).compile()
    return compiled(*arguments), sent(compiled)


def test_compressed_gradients_are_within_the_codec_error(compressed, reference):
    """An all-reduce loses 28.8 dB, an error of 0.036; a gradient passes two on its way forward and two backward."""
    for tensor, (error, cosine) in differences(compressed[0], reference).items():
        assert error < 2 * 0.036, tensor
        assert cosine > 1 - 0.036**2 * 2, tensor
    (_, y), _ = compressed[0]
    assert differences(y, reference[0][1])[""][0] > 1e-3


def test_only_local_messages_travel_over_tp(compressed):
    """Each of two sites sends forward and backward: two hops of the local batch; over dp only gradients are added."""
    over_tp = [c for c in compressed[1] if c.axis == "tp"]
    assert {c.dtype for c in over_tp} == {"u8"}
    by_op = {op: [c.payload_bytes for c in over_tp if c.op == op] for op in ("all-to-all", "all-gather")}
    assert by_op == {"all-to-all": [BLOCK_BYTES] * 4, "all-gather": [BLOCK_BYTES // RANKS] * 4}
    assert sum(map(len, by_op.values())) == len(over_tp)
    labels = {(c.site, c.direction) for c in over_tp}
    assert labels == {(site, way) for site in ("attention", "mlp") for way in ("forward", "backward")}
    others = [c for c in compressed[1] if c.axis == "dp"]
    assert {c.op for c in others} == {"all-reduce"}
    assert len(others) + len(over_tp) == len([c for c in compressed[1] if c.axis != "dp,tp"])
    parameters, _ = weights()
    gradients = sum(leaf.nbytes for leaf in parameters.values()) // RANKS
    # The mean of the loss is four bytes more.
    assert gradients <= sum(c.payload_bytes for c in compressed[1] if c.op == "all-reduce") <= gradients + 8


def test_with_tp_manual_alone_the_batch_is_gathered():
    """Why every axis is manual in the wrappers: XLA gathers what it partitions itself around an all-to-all, lax's too.

    If this fails, XLA has learned to leave the batch where it is, and `batch_spec` may become optional.
    """
    on = mesh(dp=REPLICAS, tp=RANKS)

    def compressed_sum(x, kernel):
        return taco_jax.psum(x @ kernel, "tp", compression="fp8")

    def plain_exchange(x, kernel):
        return lax.psum(lax.all_to_all(x @ kernel, "tp", 1, 1, tiled=True), "tp")

    parameters, _ = weights()
    x = jax.device_put(np.ones((BATCH, LENGTH, WIDE), np.float32), NamedSharding(on, P("dp", None, "tp")))
    kernel = jax.device_put(parameters["down"], NamedSharding(on, P("tp")))
    for product, width in ((compressed_sum, BLOCK_BYTES), (plain_exchange, 4 * LOCAL)):
        f = jax.shard_map(product, mesh=on, in_specs=(P(None, None, "tp"), P("tp")), out_specs=P(), axis_names={"tp"})
        collectives = sent(jax.jit(f).lower(x, kernel).compile())
        assert any(c.op == "all-gather" and c.axis == "dp" for c in collectives), product.__name__
        exchanged = [c.payload_bytes for c in collectives if c.op == "all-to-all"]
        assert exchanged == [REPLICAS * width], product.__name__


def test_adaptive_scales_follow_from_outside():
    """Their gradient is the observation of all devices; three passes make alphas that serve both directions."""
    on = mesh(dp=REPLICAS, tp=RANKS)

    def loss(scales, up, down, x):
        options = {"batch_spec": P("dp"), "mesh": on, "compression": ADAPTIVE, "scales": scales["mlp"], "name": "mlp"}
        return jnp.mean(jnp.square(row_parallel(jax.nn.gelu(column_parallel(x, up, **options)), down, **options)))

    @jax.jit
    def step(scales, *arguments):
        seen, *gradients = jax.grad(loss, (0, 1, 2, 3))(scales, *arguments)
        return *taco_jax.update_scales(scales, seen, axis_name=None), seen, gradients

    parameters, x = placed(on)
    arguments = parameters["up"], parameters["down"], x
    scales = taco_jax.init_scales({"mlp": ADAPTIVE})
    for _ in range(4):
        scales, stats, seen, gradients = step(scales, *arguments)
    whole = BATCH * LENGTH * HIDDEN
    np.testing.assert_array_equal(seen["mlp"][..., COUNT], [[RANKS * whole, whole]] * 2)
    assert min(stats["snr_forward"], stats["snr_backward"]) > 28
    exact = jax.jit(jax.grad(lambda up, down, x: jnp.mean(jnp.square(jax.nn.gelu(x @ up) @ down)), (0, 1, 2)))
    for tensor, (error, _) in differences(gradients, exact(*arguments)).items():
        assert error < 2 * 0.036, tensor


@pytest.mark.parametrize(("policy", "forward_messages"), [("save_payloads", 6), ("nothing_saveable", 9)])
def test_scan_and_remat(policy, forward_messages):
    """Three layers of two sites. Without the policy the first site's messages are sent again for the backward pass."""
    on = mesh(dp=REPLICAS, tp=RANKS)
    policies = {"save_payloads": taco_jax.save_payloads(), "nothing_saveable": None}
    one = wrapped("fp8", batch_spec=P("dp"), mesh=on)

    def loss(parameters, x):
        layer = jax.checkpoint(lambda x: one(parameters, x)[1], policy=policies[policy])
        return jnp.mean(jnp.square(lax.scan(lambda x, _: (layer(x), None), x, length=3)[0]))

    jaxpr = jax.make_jaxpr(jax.grad(loss))(*weights())
    messages = [c for c in planned_collectives(jaxpr, {"dp": REPLICAS, "tp": RANKS}) if c.op == "all-to-all"]
    assert sum(c.count for c in messages if c.direction == "forward") == forward_messages
    assert sum(c.count for c in messages if c.direction == "backward") == 6


def test_axes_over_which_the_input_is_the_same(reference):
    """Then they carry nothing, and the gradients are not added up over them."""
    on = mesh(dp=REPLICAS, tp=RANKS)
    parameters, x = placed(on)
    x = jax.device_put(x, NamedSharding(on, P()))
    step = jax.jit(value_and_gradients(wrapped(None, replicated_axes=("dp",), mesh=on)))
    compiled = step.lower(parameters, x).compile()
    assert {c.axis for c in sent(compiled)} == {"tp"}
    for tensor, (error, _) in differences(compiled(parameters, x), reference).items():
        assert error < 1e-6, tensor


def test_nesting(reference):
    """Inside a shard_map over dp alone it works where JAX can differentiate that, and is refused where it cannot."""
    on = mesh(dp=REPLICAS, tp=RANKS)
    model = wrapped(None)

    def loss(parameters, x):
        return lax.pmean(model(parameters, x)[0], "dp")

    def mapped(check_vma):
        options = {"axis_names": {"dp"}, "check_vma": check_vma}
        return jax.shard_map(loss, mesh=on, in_specs=(P(), P("dp")), out_specs=P(), **options)

    got = jax.jit(jax.grad(mapped(check_vma=False), (0, 1)))(*placed(on))
    for tensor, (error, _) in differences(got, reference[1]).items():
        assert error < 1e-6, tensor
    with pytest.raises(ValueError, match=r"outside shard_map, and \('dp',\) are manual here.*taco_jax.psum"):
        jax.eval_shape(mapped(check_vma=True), *weights())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_spec": P()}, r"'mlp': over mesh axes \{'dp': 2\} x would be gathered; name them in batch_spec"),
        ({"batch_spec": "dp"}, r"batch_spec must be a PartitionSpec such as P\(\"dp\"\), got 'dp'"),
        ({"batch_spec": P("dp", None, None)}, r"has more entries than x has batch axes, 2"),
        ({"batch_spec": P(("dp", "tp"))}, r"\['tp'\] stand twice"),
        ({"batch_spec": P("data")}, r"the mesh has no axis \['data'\], it has \{'dp': 2, 'tp': 4\}"),
        ({"mesh": None}, r"no mesh; pass mesh=, or call it under jax.set_mesh"),
        ({"x": (7, 16, 64)}, r"an axis of x\[7, 16, 64\] has 7 elements, which \{'dp': 2\} does not divide"),
        ({"kernel": (64, 256), "one": column_parallel, "x": (8, 16, 32)}, r"\[32\] of x meets \[64\]"),
        ({"kernel": (64, 6), "one": column_parallel}, r"kernel\[64, 6\] has 6 elements, which \{'tp': 4\} does not"),
        ({"kernel": (64,)}, r"x\[8, 16, 64\] and kernel\[64\] do not fit"),
        ({"compression": "taco"}, r"psum 'mlp': an adaptive codec needs scales"),
        ({"scales": taco_jax.SitePair(None, None)}, r"a SitePair belongs inside shard_map"),
    ],
)
def test_mistakes_are_named(changes, message):
    options = {"mesh": mesh(dp=REPLICAS, tp=RANKS), "batch_spec": P("dp"), "name": "mlp", **changes}
    one = options.pop("one", row_parallel)
    x, kernel = (jnp.zeros(options.pop(key, shape)) for key, shape in (("x", (8, 16, 64)), ("kernel", (64, 32))))
    with pytest.raises(ValueError, match=message):
        one(x, kernel, **options)


def test_the_mesh_must_be_that_of_the_context():
    with (
        jax.set_mesh(mesh(dp=REPLICAS, tp=RANKS)),
        pytest.raises(ValueError, match=r"\{'tp': 4\} is not that of the context, \{'dp': 2, 'tp': 4\}"),
    ):
        row_parallel(jnp.zeros((8, 64)), jnp.zeros((64, 32)), mesh=mesh(tp=4))


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("psum", {}),
        ("pmean", {}),
        ("psum_scatter", {}),
        ("all_gather", {}),
        ("all_to_all", {"split_axis": 0, "concat_axis": 0}),
    ],
)
def test_groups_within_an_axis_are_not_offered(op, options):
    def call(x):
        return getattr(taco_jax, op)(x, "tp", axis_index_groups=[[0, 1], [2, 3]], **options)

    with pytest.raises(NotImplementedError, match="axis_index_groups are not offered; give the groups a mesh axis"):
        jax.eval_shape(jax.shard_map(call, mesh=mesh(tp=4), in_specs=P("tp"), out_specs=P("tp")), jnp.zeros(16))
