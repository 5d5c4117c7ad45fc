"""Random cases of layers with any options and arguments, each with the formula of torch that it is compared with."""

import layers_reference as formulas
from arrays_in_memory import Given, given
from attention_problem import native, source
from attention_problems import EXTREMES, Drawing
from attention_reference import Made
from attention_sizes import Sizes
from operation_cases import Case, Operations

import polyattn as pa


class Layers(Operations):
    """The random choices of a case of an operation or a layer."""

    RECIPES = (*Operations.RECIPES, "simple", "multi_head", "multi_head", "block", "block")

    def layer(self, layer, formula, inputs, run, more, roundings=4):
        """Return a case of a layer with random parameters; ``run(layer, natives)`` returns its y and cache."""
        parameters = {
            f"p.{name}": self.floats(*x.shape, spread=0.5 if "norm" not in name else 1.0)
            for name, x in layer.parameters().items()
        }

        def call(target, /, **natives):
            mine = layer.with_parameters({name[2:]: x for name, x in natives.items() if name.startswith("p.")})
            y, cache = run(mine, {name: x for name, x in natives.items() if not name.startswith("p.")})

            def backward(dy):
                of_inputs, of_parameters = mine.backward(dy, cache)
                return of_inputs._asdict() | {f"p.{name}": dx for name, dx in of_parameters.items()}

            return y, backward

        def expected(**tensors):
            p = {name[2:]: x for name, x in tensors.items() if name.startswith("p.")}
            return formula(layer, p, {name: x for name, x in tensors.items() if not name.startswith("p.")})

        text = f"{type(layer).__name__}(**{layer.config()}), {more}"
        return Case(type(layer).__name__, inputs | parameters, call, expected, text, roundings)

    def made(self, kind, *arguments, **options):
        return kind(*arguments, **options, dtype=self.dtype, backend=self.target.name)

    def simple(self):
        shape, draw = self.shape(least=2), self.draw
        kind = draw.choice((pa.Projection, pa.LayerNorm, pa.RMSNorm, pa.FeedForward))
        if kind is pa.Projection:
            layer, formula = (
                self.made(kind, shape[-1], draw.randint(1, 6), bias=draw.random() < 0.5),
                lambda _, p, x: formulas.linear(x["x"], p),
            )
        elif kind is pa.LayerNorm:
            layer = self.made(kind, shape[-1], bias=draw.random() < 0.5, eps=draw.choice((1e-5, 0.1)))

            def formula(layer, p, x):
                return formulas.layer_norm(x["x"], p["weight"], p.get("bias"), layer.eps)
        elif kind is pa.RMSNorm:
            layer = self.made(kind, shape[-1], eps=draw.choice((1e-5, 0.1)))

            def formula(layer, p, x):
                return formulas.rms_norm(x["x"], p["weight"], layer.eps)
        else:
            activation = draw.choice(tuple(formulas.ACTIVATIONS))
            layer = self.made(kind, shape[-1], draw.randint(1, 9), activation=activation, bias=draw.random() < 0.5)

            def formula(layer, p, x):
                return formulas.feed_forward(layer, p, x["x"])

        return self.layer(layer, formula, {"x": self.floats(*shape)}, lambda layer, x: layer.forward(x["x"]), "")

    def attention_options(self):
        """Return options of multi-head attention, and d_model and the number of heads.

        The dtype is a wide one: a norm of few features magnifies the rounding of 16 bits.
        """
        draw = self.draw
        self.dtype = draw.choice(("float32", "float64"))
        kv_heads, group = draw.randint(1, 2), draw.randint(1, 3)
        head_dim = 2 * draw.randint(1, 3)
        heads = kv_heads * group
        d_model = heads * head_dim if draw.random() < 0.5 else draw.randint(2, 8)
        recipes = {
            "value_dim": draw.randint(1, 5), "scale": draw.choice((0.3, "model")),
            "rotary": draw.choice((True, self.rotation(head_dim))),
            "qk_norm": draw.choice(("rms", "layer")), "sinks": True,
            "window": draw.choice(((2, None), (1, 1), (None, 0))), "bias": False,
        }  # fmt: skip
        options = {name: value for name, value in recipes.items() if draw.random() < 0.3}
        fixed = {"head_dim": head_dim, "num_kv_heads": kv_heads, "qk_norm_eps": draw.choice((1e-2, 0.1))}
        return {**fixed, **options}, d_model, heads

    def attention_arguments(self, layer, lead, n_q, n_k):
        """Return the arguments of a call of multi-head attention, and those of its arrays that have gradients."""
        sizes = Sizes(lead, lead, lead, layer.num_heads, layer.num_kv_heads, n_q, n_k, layer.head_dim, layer.value_dim)
        drawing = Drawing(self.target, self.seed, self.index, 1 if self.few else None, sizes)
        drawing.draw, drawing.kind, drawing.power, drawing.scale = self.draw, "normal", 0, None
        drawing.dtype = drawing.other = self.dtype
        arguments = drawing.arguments()
        arguments.pop("scale", None)
        if layer.sinks:
            arguments.pop("sinks", None)
        if layer.rotary is not None and arguments.get("q_offset") in EXTREMES:
            del arguments["q_offset"]
        if layer.rotary is not None and self.draw.random() < 0.3:
            parts = [given(self.draw, self.target, self.rng.integers(0, 900, (*lead, n)), "int32") for n in (n_q, n_k)]
            arguments["positions"] = tuple(parts)
        bias, own = arguments.get("bias"), {}
        if isinstance(bias, Given):
            own["bias"] = bias
        elif isinstance(bias, Made) and bias.by is pa.relative_position_bias:
            own["bias"] = bias.arguments[0]
        if "sinks" in arguments:
            own["sinks"] = arguments["sinks"]
        return arguments, own

    def called(self, layer, arguments, natives, *inputs):
        """Call a layer with arguments of which ``natives`` has the arrays with gradients."""
        more = {name: native(x, self.target) for name, x in arguments.items() if name not in natives}
        if "bias" in natives:
            bias = arguments["bias"]
            more["bias"] = bias.by(natives["bias"], **bias.options) if isinstance(bias, Made) else natives["bias"]
        if "sinks" in natives:
            more["sinks"] = natives["sinks"]
        return layer.forward(*inputs, **more)

    def multi_head(self):
        options, d_model, heads = self.attention_options()
        lead, n_q, n_k = self.draw.choice(((), (2,), (1, 2))), self.draw.randint(1, 5), self.draw.randint(1, 6)
        alone, with_value = self.draw.random() < 0.4, self.draw.random() < 0.4
        n_k = n_q if alone else n_k
        widths = {} if alone or self.draw.random() < 0.5 else {"d_key": self.draw.randint(1, 5)}
        if with_value and widths:
            widths["d_value"] = self.draw.randint(1, 5)
        elif widths:
            widths["d_value"] = widths["d_key"]
        layer = self.made(pa.MultiHeadAttention, d_model, heads, **options, **widths)
        inputs = {"query": self.floats(*lead, n_q, d_model)}
        if not alone:
            inputs["key"] = self.floats(*lead, n_k, layer.d_key)
            if with_value:
                inputs["value"] = self.floats(*lead, n_k, layer.d_value)
        arguments, own = self.attention_arguments(layer, lead, n_q, n_k)

        def run(layer, x):
            return self.called(layer, arguments, {name: x[name] for name in own}, *(x[name] for name in inputs))

        def formula(layer, p, x):
            return formulas.multi_head(
                layer, p, x["query"], x.get("key"), x.get("value"), arguments, x.get("bias"), x.get("sinks")
            )

        return self.layer(layer, formula, inputs | own, run, source_of(arguments), roundings=8)

    def block(self):
        options, d_model, heads = self.attention_options()
        draw = self.draw
        options |= {
            "norm_first": draw.random() < 0.5, "norm": draw.choice(("layer", "rms")), "hidden": draw.randint(1, 9),
            "activation": draw.choice(tuple(formulas.ACTIVATIONS)), "eps": draw.choice((1e-2, 0.1)),
        }  # fmt: skip
        layer = self.made(pa.TransformerBlock, d_model, heads, **options)
        lead, n = draw.choice(((), (2,))), draw.randint(1, 5)
        arguments, own = self.attention_arguments(layer.attention, lead, n, n)

        def run(layer, x):
            return self.called(layer, arguments, {name: x[name] for name in own}, x["x"])

        def formula(layer, p, x):
            return formulas.block(layer, p, x["x"], arguments, x.get("bias"), x.get("sinks"))

        return self.layer(
            layer, formula, {"x": self.floats(*lead, n, d_model)} | own, run, source_of(arguments), roundings=16
        )


def source_of(arguments):
    """Return arguments as text."""
    return ", ".join(f"{name}={source(x)}" for name, x in arguments.items())
