"""The files that start the training script on a cluster: what they say is what its parts accept."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator
from torch.distributed.run import get_args_parser

from helpers import train_gpt

LAUNCH = Path(train_gpt.__file__).with_name("launch")
SBATCH = LAUNCH / "train_gpt.sbatch"

# What Slurm sets in a job of two nodes.
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_NNODES": "2",
    "SLURM_CPUS_PER_TASK": "64",
    "SLURM_GPUS_ON_NODE": "8",
}
SCONTROL = 'test "$*" = "show hostnames node[07-08]" && printf "%s\\n" node07 node08\n'
STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SRUN = f'printf "%s\\0" "$@" "OMP_NUM_THREADS=$OMP_NUM_THREADS" "${STORE}"\n'


@pytest.fixture
def slurm(tmp_path):
    """Run the batch file with commands of Slurm that say what they were asked for."""
    for name, program in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}", encoding="utf-8")
        (tmp_path / name).chmod(0o755)

    def run(*flags, **changed):
        env = os.environ | SLURM | changed | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        command = ["bash", SBATCH, *flags]
        ran = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=30)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.split("\0")[:-1]

    return run


def test_slurm_starts_a_torchrun_on_each_node(slurm):
    *words, threads, new_store = slurm("--text", "a text.txt", "--batch=64")
    start = words.index("torchrun")
    assert words[:start] == ["--cpus-per-task=64", "--kill-on-bad-exit=1"]
    asked = get_args_parser().parse_args(words[start + 1 :])
    assert (asked.nnodes, asked.nproc_per_node, asked.max_restarts) == ("2", "gpu", 3)
    assert (asked.rdzv_backend, asked.rdzv_endpoint) == ("c10d", "node07:24567")
    assert new_store == "1"
    assert (asked.module, asked.training_script) == (True, "helpers.train_gpt")
    flags = train_gpt.flags().parse_args(asked.training_script_args)
    assert flags.resume and str(flags.folder) == "runs/train_gpt-1234567"
    assert (str(flags.text), flags.batch, threads) == ("a text.txt", 64, "OMP_NUM_THREADS=6")


def test_two_jobs_on_a_node_do_not_meet(slurm):
    found = {
        word
        for job in range(1234567, 1234577)
        for word in slurm(SLURM_JOB_ID=str(job))
        if word.startswith("--rdzv-endpoint")
    }
    ports = {int(word.rpartition(":")[2]) for word in found}
    assert len(ports) == 10
    assert min(ports) >= 1024 and max(ports) < 32768  # from there on, Linux gives them away


def test_before_the_time_is_up_the_job_asks_to_be_queued_again(tmp_path):
    asked, started = tmp_path / "asked", tmp_path / "started"
    programs = {"scontrol": f'echo "$*" >> "{asked}"\necho node07'}
    programs["srun"] = f'touch "{started}"\nexec sleep 60'
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    env = os.environ | SLURM | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", SBATCH], env=env, start_new_session=True)
    try:
        deadline = time.monotonic() + 20
        while job.poll() is None:
            assert time.monotonic() < deadline
            if started.exists():
                job.send_signal(signal.SIGUSR1)
            time.sleep(0.2)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert asked.read_text(encoding="utf-8").splitlines()[-1] == "requeue 1234567"


def test_the_shared_memory_of_a_container_is_larger_than_its_default():
    for kind in ("pytorchjob", "trainjob"):
        assert "mountPath': '/dev/shm'" in str(job(kind)) and "'medium': 'Memory'" in str(job(kind))


def test_the_batch_file_is_sound_bash():
    subprocess.run(["bash", "-n", SBATCH], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", SBATCH], check=True)


def fields(required=(), **properties):
    """A JSON schema of an object that has these fields and no others."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return schema | {"additionalProperties": False}


def items(schema):
    return {"type": "array", "items": schema, "minItems": 1}


TEXT, NUMBER = {"type": "string"}, {"type": "integer"}
RESOURCES = fields(limits={"type": "object", "additionalProperties": TEXT})
ENV = items(fields(name=TEXT, value=TEXT))
MOUNTS = items(fields(name=TEXT, mountPath=TEXT))
VOLUMES = items(
    fields(
        required=["name"],
        name=TEXT,
        persistentVolumeClaim=fields(claimName=TEXT),
        emptyDir=fields(medium={"const": "Memory"}),
    )
)

# The fields that the files use, as the CRDs of github.com/kubeflow/trainer name and type them.
# Tag v1.9.4, kubeflow.org_pytorchjobs.yaml; the names of container and replica are those that
# pkg/webhooks/pytorch asks for:
PYTORCHJOB = fields(
    nprocPerNode=TEXT,
    elasticPolicy=fields(
        rdzvBackend={"const": "c10d"}, minReplicas=NUMBER, maxReplicas=NUMBER, maxRestarts=NUMBER
    ),
    pytorchReplicaSpecs=fields(
        required=["Worker"],
        Worker=fields(
            replicas=NUMBER,
            restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
            template=fields(
                spec=fields(
                    containers=items(
                        fields(
                            required=["image"],
                            name={"const": "pytorch"},
                            image=TEXT,
                            command=items(TEXT),
                            args=items(TEXT),
                            env=ENV,
                            resources=RESOURCES,
                            volumeMounts=MOUNTS,
                        )
                    ),
                    volumes=VOLUMES,
                )
            ),
        ),
    ),
)
# Tag v2.3.0, trainer.kubeflow.org_trainjobs.yaml; "node" is the name in the runtime
# torch-distributed:
NODE = fields(
    containers=items(fields(name={"const": "node"}, volumeMounts=MOUNTS)), volumes=VOLUMES
)
JOB = fields(spec=fields(template=fields(spec=NODE)))
JOBSET = fields(spec=fields(replicatedJobs=items(fields(name={"const": "node"}, template=JOB))))
TRAINJOB = fields(
    required=["runtimeRef"],
    runtimeRef=fields(apiGroup=TEXT, kind={"const": "ClusterTrainingRuntime"}, name=TEXT),
    trainer=fields(
        image=TEXT,
        numNodes=NUMBER,
        numProcPerNode=NUMBER,
        command=items(TEXT),
        args=items(TEXT),
        env=ENV,
        resourcesPerNode=RESOURCES,
    ),
    runtimePatches=items(fields(manager=TEXT, trainingRuntimeSpec=fields(template=JOBSET))),
)


def job(kind):
    return yaml.safe_load((LAUNCH / f"train_gpt.{kind}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("kind", "version", "spec"),
    [
        ("PyTorchJob", "kubeflow.org/v1", PYTORCHJOB),
        ("TrainJob", "trainer.kubeflow.org/v1alpha1", TRAINJOB),
    ],
)
def test_kubernetes_knows_every_field(kind, version, spec):
    schema = fields(
        required=["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=fields(name=TEXT),
        spec=spec,
    )
    written = job(kind.lower())
    Draft202012Validator(schema).validate(written)
    wrong = written | {"spec": written["spec"] | {"nnodes": 2}}
    assert not Draft202012Validator(schema).is_valid(wrong)


def test_only_a_rendezvous_of_c10d_is_asked_to_restart():
    elastic = job("pytorchjob")["spec"]
    assert elastic["elasticPolicy"]["rdzvBackend"] == "c10d"
    container = elastic["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert {"name": STORE, "value": "1"} in container["env"]
    trainer = job("trainjob")["spec"]["trainer"]  # its rendezvous is static
    assert "max-restarts" not in str(trainer) and "PET_MAX_RESTARTS" not in str(trainer)


def test_the_flags_in_the_kubernetes_files_fit_each_number_of_nodes():
    elastic = job("pytorchjob")["spec"]
    (container,) = elastic["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    policy = elastic["elasticPolicy"]
    nodes = range(policy["minReplicas"], policy["maxReplicas"] + 1)
    assert elastic["pytorchReplicaSpecs"]["Worker"]["replicas"] in nodes
    fixed = job("trainjob")["spec"]["trainer"]
    each = int(elastic["nprocPerNode"])
    cases = [(container, number * each) for number in nodes]
    cases += [(fixed, fixed["numNodes"] * fixed["numProcPerNode"])]
    for part, ranks in cases:
        assert part["command"] == ["torchrun", "-m", "helpers.train_gpt"]
        flags = train_gpt.flags().parse_args(part["args"])
        train_gpt.check(flags, ranks)
        assert flags.resume and flags.parallel == "fsdp2"
