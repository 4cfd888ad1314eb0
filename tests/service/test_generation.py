from penstock.v1 import generation_pb2 as pb
async def test_one(start_service):
    s = await start_service()
    out=[]
    async for m in s.generation.GenerateOne(pb.GenerateOneRequest(start=pb.Start(ref=7,text="hello",sampling=pb.Sampling(max_tokens=5)))):
        out.append(m)
    print(out)
    r=await s.generation.Complete(pb.CompleteRequest(start=pb.Start(ref=7,text="hello",sampling=pb.Sampling(max_tokens=5),output=pb.Output(format=3,logprobs=2,prompt_logprobs=1))))
    print(r)
    call=s.generation.Generate()
    await call.write(pb.GenerateRequest(start=pb.Start(text="hi",sampling=pb.Sampling(max_tokens=3))))
    await call.write(pb.GenerateRequest(start=pb.Start(ref=2,text="hi",sampling=pb.Sampling(max_tokens=3000000))))
    await call.done_writing()
    async for m in call: print(m)
    print(await call.code())
