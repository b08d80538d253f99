# A benchmark of five requests one after another, and eight at once; URL MODEL.
for profile in kind=synchronous kind=concurrent,streams=4; do
    if guidellm run --backend "kind=openai_http,target=$1,model=$(basename "$2")" --profile "$profile" \
        --constraint kind=max_requests,count=8 --tokenizer "kind=hf_auto,model=$2" \
        --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 --output kind=json,path=told.json \
        --disable-console >said 2>&1 && python -c '
import json
[run] = json.load(open("told.json"))["benchmarks"]
done = run["requests"]
assert len(done["successful"]) == 8 and not done["errored"], {key: len(value) for key, value in done.items()}
' >>said 2>&1; then
        echo "passed 8 requests, $profile"
    else
        echo "failed 8 requests, $profile: $(tail -1 said)"
    fi
done
