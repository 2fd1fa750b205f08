"""A tiny target of each built-in model, for tests: well under a second a step and under 50 MB."""

from collections.abc import Mapping

from lowtide.models.catalog import BUILDERS

OPTIONS = {
    "mlp": "width=32,depth=3,features=16,batch=8",
    "tanh-chain": "length=10,width=64,batch=16",
    "resnet": "stages=1-1-1-1,width=8,batch=2,size=64,classes=10",
    "wrn-28-2": "blocks=2,batch=2",
    "densenet121": "stages=2-2-2-2,growth=4,batch=2,size=64,classes=10",
    "unet": "width=4,depth=2,batch=2,size=16",
    "gpt": "layers=2,width=32,heads=2,context=16,vocabulary=64,batch=2",
    "bert": "layers=2,width=32,heads=2,context=16,vocabulary=64,batch=2",
    "lstm": "layers=2,width=16,length=8,vocabulary=64,batch=2",
    "gru": "layers=2,width=16,length=8,vocabulary=64,batch=2",
    "lstm-cell": "length=8,width=16,batch=4",
    "deep-rnn": "layers=4,width=16,length=6,batch=2",
    "dynamicconv": "encoder=2,decoder=2,width=32,inner=64,source_vocabulary=64,target_vocabulary=48,"
    "source_length=10,target_length=9,batch=2",
    "hf-gpt2": "layers=2,width=32,heads=2,context=16,vocabulary=64,batch=2",
    "hf-bert": "layers=2,width=32,heads=2,context=16,vocabulary=64,batch=2",
}

SMALL: Mapping[str, str] = {name: f"{name}:{OPTIONS[name]}" for name in BUILDERS}
