import json
import os
import random
import sys
import time
import traceback

t00=time.time()
import torch

sys.path.insert(0, os.getcwd())
from outrider import LLM, SamplingParams

OUT=os.environ.get("OUT","/tmp")
def log(**k): print(json.dumps(k), flush=True)
def check():
    # tiny model: torch eager vs triton eager vs graphs, float32
    import tempfile
    cfg=json.load(open("bench/configs/qwen06b/config.json")); cfg.update(hidden_size=256,intermediate_size=512,num_hidden_layers=4,num_attention_heads=4,num_key_value_heads=2,head_dim=64,vocab_size=1000,max_position_embeddings=2048)
    d=tempfile.mkdtemp(); json.dump(cfg, open(d+"/config.json","w"))
    random.seed(1); prompts=[[random.randint(3,900) for _ in range(n)] for n in (3,17,40,130,300,64)]
    ref=None
    for kw in (dict(attention_backend="torch", enforce_eager=True), dict(enforce_eager=True), dict(), dict(speculative_config={"method":"ngram","num_speculative_tokens":3,"auto":False,"prompt_lookup_min":1}), dict(speculative_config={"method":"draft_model","model":d,"num_speculative_tokens":3,"auto":False})):
        try:
            llm=LLM(d, dtype="float32", load_format="dummy", max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=256, kv_cache_memory_bytes=1<<28, **kw)
            m=llm.engine.runner.device_step.model
            g=torch.Generator(device="cuda").manual_seed(0)
            for n,s in m.weights().items():
                if "norm" not in n: s.target.copy_(torch.randn(s.target.shape, generator=g, device="cuda")*0.08)
                else: s.target.fill_(1.0)
            m.finalize()
            dr=llm.engine.runner.device_step.drafter
            if dr is not None and hasattr(dr,"network"):
                for (n,a),(n2,b) in zip(m.weights().items(), dr.network._model.weights().items()): b.target.copy_(a.target)
                dr.network._model.finalize()
            res=[]
            for temp in (0,1.0):
                o=llm.generate(prompts, SamplingParams(temperature=temp, seed=5, max_tokens=60, ignore_eos=True))
                res.append([x.outputs[0].token_ids for x in o])
            if ref is None: ref=res
            same=[sum(a==b for a,b in zip(r,q)) for r,q in zip(res,ref)]
            log(check=str(kw)[:80], equal=same, of=len(prompts), replays=llm.engine.runner.num_replays, eager=llm.engine.runner.num_eager, acc=[x.metrics.num_accepted_tokens for x in o])
            llm.close(); del llm, m; torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
def bench(name, shapes, **kw):
    t=time.time()
    llm=LLM("bench/configs/"+name, load_format="dummy", max_model_len=4096, max_num_seqs=256, enable_prefix_caching=False, gpu_memory_utilization=0.85, **kw)
    t1=time.time()
    llm.generate([[5]*64], SamplingParams(temperature=0,max_tokens=16,ignore_eos=True))
    log(model=name, start=round(t1-t,1), first=round(time.time()-t,1), kw=str(kw)[:100])
    random.seed(0)
    for b,i,o in shapes:
        pr=[[random.randint(100,30000) for _ in range(i)] for _ in range(b)]
        best=1e9
        for _ in range(2):
            t=time.time(); r=llm.generate(pr, SamplingParams(temperature=0,max_tokens=o,ignore_eos=True,detokenize=False)); best=min(best,time.time()-t)
        n=sum(len(x.outputs[0].token_ids) for x in r)
        st=sum(x.metrics.num_steps for x in r); ac=sum(x.metrics.num_accepted_tokens for x in r)
        log(case=f"{b}x{i}x{o}", tok_s=round(n/best,1), s=round(best,3), run=round(1+ac/max(1,st),2))
    return llm
def prof(llm, b=1, out="prof"):
    from torch.profiler import ProfilerActivity, profile
    pr=[[7]*128 for _ in range(b)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as p:
        llm.generate(pr, SamplingParams(temperature=0,max_tokens=12,ignore_eos=True,detokenize=False))
    s=p.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=70)
    open(f"{OUT}/{out}.txt","w").write(s)
SPEC={"llama8b":{"method":"eagle3","model":"bench/configs/llama8b-eagle3"},"gemma4-4b":{"method":"mtp","model":"bench/configs/gemma4-4b-assistant"},"nemotronh-15b-a2b":{"method":"mtp"}}
def attempt(f):
    try: return f()
    except Exception: traceback.print_exc()
if __name__=="__main__":
    what=sys.argv[1:]
    shapes=[tuple(map(int,x.split("x"))) for x in os.environ.get("SHAPES","1x128x256,8x128x256,64x128x256,256x128x256").split(",")]
    for w in what:
        name,_,mode=w.partition(":")
        if name=="check": check(); continue
        kw={}
        if mode.startswith("spec"): kw["speculative_config"]=dict(SPEC[name], num_speculative_tokens=3, rejection_sample_method="synthetic", **({"auto":False} if mode=="specfix" else {}))
        def go():
            llm=bench(name, shapes, **kw)
            if "prof" in os.environ: prof(llm,int(os.environ["prof"]),f"{name}_{mode}_b{os.environ['prof']}")
            llm.close()
        attempt(go); import gc; gc.collect(); torch.cuda.empty_cache()
