// npm packages whose own loops run; the last of so many steps may not call.
const [name, url, picture, schema, asked, steps, streamed] = JSON.parse(process.argv[2]);
const model = 'tiny-vlm', description = 'Look at a place of the picture.', said = 'a frog';
const data = picture.split(',')[1], calls = [], requests = [];
const counting = (where, given) => { requests.push(where); return fetch(where, given); };
const options = { apiKey: 'none', maxRetries: 0, fetch: counting };
const run = (given) => { calls.push(given); return said; };
if (name === 'openai') {
  const { default: OpenAI } = await import('openai');
  const client = new OpenAI({ ...options, baseURL: url });
  const text = { type: 'text', text: asked };
  const image = { type: 'image_url', image_url: { url: picture } };
  const look = { name: 'look', description, parameters: schema, parse: JSON.parse, function: run };
  const runner = client.chat.completions.runTools({
    model, temperature: 0, max_tokens: 1000, tool_choice: 'required', parallel_tool_calls: false,
    messages: [{ role: 'user', content: [image, text] }], stream: streamed,
    tools: [{ type: 'function', function: look }],
  }, { maxChatCompletions: steps });
  await runner.done();
} else if (name === '@anthropic-ai/sdk') {
  const { default: Anthropic } = await import('@anthropic-ai/sdk');
  const client = new Anthropic({ ...options, baseURL: url.replace(/\/v1$/, '') });
  const image = { type: 'image', source: { type: 'base64', media_type: 'image/png', data } };
  const look = { type: 'custom', name: 'look', description, input_schema: schema, parse: (x) => x,
    run: (given) => [{ type: 'text', text: run(given) }, image] };
  const runner = client.beta.messages.toolRunner({
    model, temperature: 0, max_tokens: 1000, stream: streamed, max_iterations: steps, tools: [look],
    tool_choice: { type: 'any', disable_parallel_tool_use: true },
    messages: [{ role: 'user', content: [image, { type: 'text', text: asked }] }],
  });
  for await (const made of runner) if (streamed) await made.finalMessage();
} else {
  const { generateText, jsonSchema, stepCountIs, streamText, tool } = await import('ai');
  const [, maker, form] = /^@ai-sdk\/([^.]*)\.?(.*)$/.exec(name);
  const module = await import(`@ai-sdk/${maker}`);
  const own = { ...options, baseURL: url, name: 'mmkv' };
  const [create] = ['OpenAI', 'Anthropic', 'OpenAICompatible'].map((one) => module[`create${one}`])
    .filter(Boolean);
  const made = create(own);
  // To chats it would send a result's picture as a text of base64: there the user shows it.
  const shows = form === 'chat' || maker.includes('compatible');
  const parts = [{ type: 'text', text: said }, { type: 'media', data, mediaType: 'image/png' }];
  const result = shows ? { type: 'text', value: said } : { type: 'content', value: parts };
  const look = tool({
    description, inputSchema: jsonSchema(schema), execute: run, toModelOutput: () => result,
  });
  const image = { type: 'image', image: Buffer.from(data, 'base64'), mediaType: 'image/png' };
  const messages = [{ role: 'user', content: [image, { type: 'text', text: asked }] }];
  const settings = { model: form ? made[form](model) : made(model), tools: { look }, temperature: 0,
    maxRetries: 0, maxOutputTokens: 1000, messages, stopWhen: stepCountIs(steps),
    onError: ({ error }) => { throw error; },
    providerOptions: { openai: { parallelToolCalls: false }, mmkv: { parallel_tool_calls: false },
      anthropic: { disableParallelToolUse: true } },
    prepareStep: ({ stepNumber: at, messages: now }) => ({
      toolChoice: at < steps - 1 ? 'required' : 'none',
      messages: now.flatMap((one) => shows && one.role === 'tool'
        ? [one, { role: 'user', content: [image] }] : [one]),
    }) };
  const first = streamed ? streamText(settings) : await generateText(settings);
  const all = await first.steps;
  // A conversation goes on with what came of it: one of its messages may be known by its id alone.
  messages.push(...(await first.response).messages, { role: 'user', content: 'and now?' });
  const last = await generateText({ ...settings, messages, stopWhen: stepCountIs(1), tools: {},
    prepareStep: undefined, maxOutputTokens: 20 });
  if (all.length !== steps || !last.steps.length) throw new Error(`${all.length} steps`);
  requests.pop();
}
console.log(JSON.stringify([requests.length, calls]));
