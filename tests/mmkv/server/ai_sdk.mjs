// Vercel's AI SDK, with whole replies and streamed ones: a talk, and a loop of tool calls.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';
const [url, picture, schema, ...asked] = JSON.parse(process.argv[2]);
const model = createOpenAICompatible({ name: 'mmkv', baseURL: url })('tiny-vlm');
const data = Buffer.from(picture.split(',')[1], 'base64');
const image = { type: 'image', image: data, mediaType: 'image/png' };
const messages = [], said = [];
for (const text of asked) {
  const content = [{ type: 'text', text }];
  if (!messages.length) content.unshift(image);
  messages.push({ role: 'user', content });
  const settings = { model, messages, temperature: 0, maxOutputTokens: 20 };
  let reply = '';
  if (said.length) for await (const piece of streamText(settings).textStream) reply += piece;
  else reply = (await generateText(settings)).text;
  said.push(reply);
  messages.push({ role: 'assistant', content: reply });
}
const calls = [];
if (schema) for (const streamed of [false, true]) {
  const look = tool({
    description: 'Look at a place of the picture.',
    inputSchema: jsonSchema(schema),
    execute: async (given) => { calls.push(given); return 'a frog'; },
  });
  const settings = {
    model, tools: { look }, toolChoice: 'required', stopWhen: stepCountIs(2), temperature: 0,
    maxOutputTokens: 1000,
    messages: [{ role: 'user', content: [image, { type: 'text', text: asked[0] }] }],
  };
  const made = streamed ? streamText(settings) : await generateText(settings);
  for (const step of await made.steps)
    if (step.finishReason !== 'tool-calls') throw new Error(`it ends by ${step.finishReason}`);
}
console.log(JSON.stringify([said, calls]));
