import pytest
import torch
from torch.nn import functional

from shardwright.errors import PlanError
from shardwright.models.convnet import ConvNetConfig, build_convnet
from shardwright.models.mlp import MLPConfig, build_mlp


def test_an_mlp_is_linear_activation_linear():
    model = build_mlp(MLPConfig(widths=(4, 8, 2), activation="relu"))
    x = torch.randn(3, 4)
    expected = functional.linear(
        functional.linear(x, model.linear1.weight, model.linear1.bias).clamp(min=0),
        model.linear2.weight,
        model.linear2.bias,
    )
    torch.testing.assert_close(model(x), expected)


def test_dropout_stands_after_every_activation():
    names = [name for name, _ in build_mlp(MLPConfig(widths=(4, 8, 8, 2), dropout=0.1)).named_children()]
    assert names[:4] == ["linear1", "activation1", "dropout1", "linear2"]
    assert names[-1] == "linear3"


def test_the_convnet_has_the_shapes_of_the_cifar_network():
    shapes = {name: tuple(p.shape) for name, p in build_convnet(ConvNetConfig()).named_parameters()}
    assert shapes == {
        "conv1.conv.weight": (6, 3, 5, 5),
        "conv1.conv.bias": (6,),
        "conv2.conv.weight": (16, 6, 5, 5),
        "conv2.conv.bias": (16,),
        "fc.linear1.weight": (120, 400),
        "fc.linear1.bias": (120,),
        "fc.linear2.weight": (84, 120),
        "fc.linear2.bias": (84,),
        "out.linear.weight": (10, 84),
        "out.linear.bias": (10,),
    }


def test_the_convnet_equals_its_operators_one_by_one():
    torch.manual_seed(0)
    model = build_convnet(ConvNetConfig())
    p = dict(model.named_parameters())
    x = y = torch.randn(2, 3, 32, 32)
    for name in ("conv1.conv", "conv2.conv"):
        y = functional.max_pool2d(functional.conv2d(y, p[f"{name}.weight"], p[f"{name}.bias"]).relu(), 2)
    y = y.flatten(1)
    for name in ("fc.linear1", "fc.linear2"):
        y = functional.linear(y, p[f"{name}.weight"], p[f"{name}.bias"]).relu()
    torch.testing.assert_close(model(x), functional.linear(y, p["out.linear.weight"], p["out.linear.bias"]))


def test_softmax_is_an_option_that_keeps_the_parameter_names():
    plain, soft = build_convnet(ConvNetConfig()), build_convnet(ConvNetConfig(softmax=True))
    soft.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(soft(x), plain(x).softmax(-1))


def test_models_are_built_on_meta_and_drawn_leaf_by_leaf():
    with torch.device("meta"):
        models = [build_mlp(MLPConfig()), build_convnet(ConvNetConfig())]
    for model in models:
        assert not list(model.buffers())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        for module in model.modules():
            if list(module.parameters(recurse=False)):
                module.reset_parameters()
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("settings", [{"image_size": 12}, {"channels": ()}, {"hidden": (0,)}, {"kernel": 0}])
def test_a_convnet_that_leaves_no_pixel_or_layer_is_refused(settings):
    with pytest.raises(PlanError, match="fix:"):
        ConvNetConfig(**settings)
