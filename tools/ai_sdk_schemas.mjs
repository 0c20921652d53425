// Writes tests/support/ai_sdk_schemas.json: the zod schemas by which Vercel's AI SDK checks answers
// (Apache-2.0), as JSON schemas, without the parts that this server's answers never have.
//
//     npm install @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod
//     node ai_sdk_schemas.mjs > ai_sdk_schemas.json       (where node_modules is)
import fs from 'fs';
import path from 'path';

const STREAMED = ['created', 'in_progress', 'completed', 'incomplete', 'failed'].concat(
  ['output_item', 'content_part'].flatMap((one) => [`${one}.added`, `${one}.done`]),
  ['output_text', 'reasoning_text', 'function_call_arguments'].flatMap((one) => [`${one}.delta`, `${one}.done`]),
).map((one) => `response.${one}`);
const OURS = new Set([...STREAMED, ...`message reasoning function_call output_text reasoning_text
  text thinking tool_use error direct ping message_start message_delta message_stop
  content_block_start content_block_delta content_block_stop text_delta thinking_delta
  signature_delta input_json_delta`.split(/\s+/)]);
const WANTED = {
  openai: {
    responses: 'openaiResponsesResponseSchema()', 'responses, event': 'openaiResponsesChunkSchema()',
    chat: 'openaiChatResponseSchema()', 'chat, event': 'openaiChatChunkSchema()',
    completions: 'openaiCompletionResponseSchema()',
    'completions, event': 'openaiCompletionChunkSchema()',
  },
  'openai-compatible': {
    'chat, compatible': 'OpenAICompatibleChatResponseSchema()',
    'chat, compatible, event': 'zodSchema3(createOpenAICompatibleChatChunkSchema('
      + 'defaultOpenAICompatibleErrorStructure.errorSchema))',
  },
  anthropic: {
    messages: 'anthropicMessagesResponseSchema()', 'messages, event': 'anthropicMessagesChunkSchema()',
  },
};

function pruned(schema) {
  if (Array.isArray(schema)) return schema.map(pruned);
  if (schema === null || typeof schema !== 'object') return schema;
  const made = {};
  for (const [name, value] of Object.entries(schema)) {
    if (name === '$schema' || (name === 'additionalProperties' && value === false)) continue; // zod lets others be
    const kept = Array.isArray(value) && value.filter((one) => OURS.has(one?.properties?.type?.const ?? 'text'));
    if (name !== 'anyOf' && name !== 'oneOf') made[name] = pruned(value);
    else if (kept.length) made.anyOf = pruned(kept);
    else made.not = {};
  }
  return made;
}

const schemas = {}, versions = [];
for (const [name, wanted] of Object.entries(WANTED)) {
  const folder = path.resolve(`node_modules/@ai-sdk/${name}`), file = `${folder}/dist/exported.mjs`;
  const getters = Object.entries(wanted).map(([key, call]) => `${JSON.stringify(key)}: () => ${call}`);
  const source = fs.readFileSync(`${folder}/dist/index.mjs`, 'utf8');
  fs.writeFileSync(file, `${source}\nexport const exported = { ${getters.join(', ')} };\n`);
  const { exported } = await import(file);
  fs.unlinkSync(file);
  for (const key of Object.keys(wanted)) schemas[key] = pruned(await exported[key]().jsonSchema);
  versions.push(`@ai-sdk/${name} ${JSON.parse(fs.readFileSync(`${folder}/package.json`)).version}`);
}
const lines = Object.entries(schemas).map(([key, one]) => `${JSON.stringify(key)}: ${JSON.stringify(one)}`);
console.log(`{"made of": ${JSON.stringify(versions.join(', '))},\n${lines.join(',\n')}}`);
