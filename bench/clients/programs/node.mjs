// URL MODEL
import { strict as assert } from 'node:assert';
import { basename } from 'node:path';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, streamText, tool } from 'ai';
import OpenAI from 'openai';

const [baseURL, model] = [`${process.argv[2]}/v1`, basename(process.argv[3])];
const openai = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const sdk = createOpenAICompatible({ name: 'relay', baseURL, includeUsage: true });
const chat = { model, messages: [{ role: 'user', content: 'Hi' }], max_tokens: 6, seed: 1 };
const asked = { model: sdk(model), prompt: 'Hi', maxOutputTokens: 6, seed: 2, maxRetries: 0 };
const add = tool({ description: 'Add', inputSchema: jsonSchema({ type: 'object', properties: {} }), execute: async () => 1 });

const checks = {
  'openai: models, chat and stream alike': async () => {
    assert.equal((await openai.models.list()).data[0].id, model);
    const whole = await openai.chat.completions.create(chat);
    let text = '';
    let usage;
    const parts = await openai.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
    for await (const part of parts) {
      text += part.choices[0]?.delta?.content ?? '';
      usage = part.usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.deepEqual(usage, whole.usage);
  },
  'openai: a stream let go': async () => {
    const parts = await openai.chat.completions.create({ ...chat, max_tokens: 900, stream: true });
    let count = 0;
    for await (const part of parts) if (part && ++count > 3) parts.controller.abort();
    assert(count < 900);
  },
  'openai: an unknown model refused': async () => {
    await assert.rejects(openai.chat.completions.create({ ...chat, model: 'nope' }), { status: 404, code: 'model_not_found' });
  },
  'AI SDK: text and stream alike': async () => {
    const whole = await generateText(asked);
    const parts = streamText(asked);
    let text = '';
    for await (const part of parts.textStream) text += part;
    assert.equal(text, whole.text);
    assert.equal((await parts.usage).totalTokens, whole.usage.totalTokens);
    assert.equal(await parts.finishReason, 'length');
  },
  'AI SDK: tools, and a completion': async () => {
    assert.equal((await generateText({ ...asked, tools: { add } })).finishReason, 'length');
    assert((await generateText({ ...asked, model: sdk.completionModel(model) })).text);
  },
  'AI SDK: a forced call refused in a sentence': async () => {
    await assert.rejects(generateText({ ...asked, tools: { add }, toolChoice: 'required' }), /tool_choice is 'required'/);
  },
};
for (const [what, check] of Object.entries(checks)) {
  try {
    await check();
    console.log(`passed ${what}`);
  } catch (error) {
    console.log(error);
    console.log(`failed ${what}: ${String(error).replaceAll('\n', ' ').slice(0, 200)}`);
  }
}
