"""The one table of everything that has a name. Adding a method is one line here.

Each line is `name: "module:function"` (or class). The module is imported when the name is first used.
"""

from __future__ import annotations

TABLE: dict[str, dict[str, str]] = {
    "strategies": {
        "data_parallel": "thinwire.strategies.data_parallel:DataParallel",
        "alone": "thinwire.strategies.alone:Alone",
        "local_sgd": "thinwire.strategies.local_sgd:LocalSGD",
        "diloco": "thinwire.strategies.local_sgd:DiLoCo",
        "daso": "thinwire.strategies.daso:DASO",
        "ab": "thinwire.strategies.ab:AB",
        "ist": "thinwire.strategies.ist:IST",
        "local_parallel": "thinwire.strategies.local_parallel:LocalParallel",
        "pipeline": "thinwire.strategies.pipeline:Pipeline",
        "sequence": "thinwire.strategies.sequence:Sequence",
        "auto": "thinwire.plan.auto:Auto",
    },
    "reducers": {
        "mean": "thinwire.reducers.mean:mean",
        "fp16": "thinwire.reducers.half:fp16",
        "bf16": "thinwire.reducers.half:bf16",
        "maxnorm": "thinwire.reducers.maxnorm:maxnorm",
        "maxnorm_multiscale": "thinwire.reducers.maxnorm_multiscale:maxnorm_multiscale",
        "global_randk": "thinwire.reducers.global_randk:global_randk",
        "powersgd": "thinwire.reducers.powersgd:powersgd",
        "topk": "thinwire.reducers.topk:topk",
        "terngrad": "thinwire.reducers.terngrad:terngrad",
        "sign": "thinwire.reducers.sign:sign",
        "error_feedback": "thinwire.reducers.error_feedback:error_feedback",
        "partition": "thinwire.reducers.partition:partition",
        "warmup": "thinwire.reducers.warmup:warmup",
    },
    "heads": {
        "suited": "thinwire.surgery.heads.suited:suited",
        "linear": "thinwire.surgery.heads.linear:linear",
        "conv": "thinwire.surgery.heads.conv:conv",
        "predsim": "thinwire.surgery.heads.predsim:predsim",
        "auglocal": "thinwire.surgery.heads.auglocal:auglocal",
        "readout": "thinwire.surgery.heads.readout:readout",
        "own": "thinwire.surgery.heads.own:own",
    },
    "tasks": {
        "digits": "thinwire.tasks.digits:digits",
        "synthetic": "thinwire.tasks.synthetic:synthetic",
        "mnist": "thinwire.tasks.mnist:mnist",
        "cifar10": "thinwire.tasks.cifar10:cifar10",
        "shakespeare": "thinwire.tasks.shakespeare:shakespeare",
    },
    "models": {
        "mlp": "thinwire.tasks.models.mlp:mlp",
        "cnn": "thinwire.tasks.models.cnn:cnn",
        "vgg16": "thinwire.tasks.models.vgg:vgg16",
        "vgg8": "thinwire.tasks.models.vgg:vgg8",
        "resnet18": "thinwire.tasks.models.resnet:resnet18",
        "resnet32": "thinwire.tasks.models.resnet:resnet32",
        "resnet50": "thinwire.tasks.models.resnet:resnet50",
        "gpt": "thinwire.tasks.models.gpt:gpt",
        "vit": "thinwire.tasks.models.vit:vit",
    },
    "optimizers": {
        "sgd": "thinwire.optim:sgd",
        "adamw": "thinwire.optim:adamw",
    },
    "schedules": {
        "constant": "thinwire.optim:constant",
        "cosine": "thinwire.optim:cosine",
    },
}
SINGULAR = {
    "strategies": "strategy",
    "reducers": "reducer",
    "heads": "head",
    "tasks": "task",
    "models": "model",
    "optimizers": "optimizer",
    "schedules": "schedule",
}
