/** What the server says, and how to ask it. The types are those of docs/how_to/report.md. */

export interface Alarm {
  name: string
  title: string
  first_step: number | null
  message: string
  look: string
}

export type States = Record<string, number>

export interface RunLine {
  id: string
  name: string
  path: string
  state: 'running' | 'finished' | 'stopped' | 'dead' | 'unreadable'
  reason: string
  fault: string | null
  started: number | null
  step: number
  steps: number | null
  version: number
  accuracy: number | null
  reward: number | null
  rl_seconds: number | null
  wall_seconds: number | null
  steps_per_second: number | null
  trained_tokens: number | null
  generated_tokens: number | null
  trajectories: States | null
  task: string | null
  engines: number
  alarms: number | null // null until the run was opened
}

export interface Branch {
  id: string
  run: string | null
  first_step: number
  last_step: number
  changes: Record<string, string>
}

export interface Replay {
  run: string
  from: number
  set: string[]
  state: 'running' | 'done' | 'refused' | 'stopped' | 'failed'
  reason: string
  seconds: number
  log: string
  branch: string | null
}

export interface RunList {
  runs: RunLine[]
  branches: Branch[]
  left_out: number
}

export interface EngineLine {
  name: string
  kind: string
  host: string
  version: number
  joined_step: number | null
  left_step: number | null
  reason: string
}

export interface RunDetail extends Omit<RunLine, 'alarms'> {
  recipe: string
  versions: Record<string, unknown> | null
  machine: Record<string, unknown> | null
  totals: Record<string, unknown> | null
  engines_list: EngineLine[]
  series: string[]
  evaluation_sets: string[]
  alarms: Alarm[]
  alarms_checked: number
  alarms_not_measured: string[]
  indexed: number
}

/** The alarms of now, and what could not be looked at. */
export type Findings = Pick<RunDetail, 'alarms' | 'alarms_checked' | 'alarms_not_measured'>

export type Column = (number | null)[]
export const AXES = ['step', 'wall_seconds', 'rl_seconds', 'trained_tokens', 'trajectories'] as const
export type Axis = (typeof AXES)[number]

export interface Evaluation {
  set: string
  step: number
  version: number
  wall_seconds: number
  rl_seconds: number
  accuracy: number
  ci95: [number, number] | null
}

export interface Series {
  steps: number
  points: number
  bucket: number
  x: Record<Axis, Column>
  series: Record<string, { mean: Column; min: Column; max: Column; newest: number | null }>
  evaluations: Evaluation[]
}

export interface TrajectoryLine {
  id: string
  group: string
  member: number
  prompt_id: string
  prompt: string | null
  state: string
  reason: string
  verdict: string | null
  reward: number | null
  length: number | null
  stop_reason: string | null
  oldest_version: number | null
  newest_version: number | null
  admitted_version: number | null
  trained_step: number | null
  staleness: number | null
  interrupted: number
}

export interface TrajectoryPage {
  total: number
  matched: number
  offset: number
  limit: number
  indexed: number
  searched: number
  rows: TrajectoryLine[]
}

export interface TokenColumns {
  id: number[]
  text: string[]
  version: Column | null
  staleness: Column | null
  logprob: Column | null
  trainer_logprob: Column | null
  difference: Column | null
  ratio: Column | null
  advantage: Column | null
  fate: string[] | null
}

export interface Segment {
  index: number
  role: string
  sampled: boolean
  parent: number | null
  cause: string
  stop_reason: string | null
  reward: number | null
  engines: [string, number][]
  interrupted: number
  length: number
  offset: number
  calls: { name: string; arguments: string }[]
  tokens: TokenColumns
}

export interface LifeEvent {
  event: string
  text: string
  version: number | null
  token: number | null
  step: number | null
  engine: string | null
  at: number | null
}

export interface TrainingSums {
  in_loss: number
  clipped_high: number
  clipped_low: number
  corrected: number
  masked_by_correction: number
  masked: number
}

export interface Trajectory extends TrajectoryLine {
  prompt_text: string | null
  prompt_cut: boolean
  answer: string | null
  text: string
  text_cut: boolean
  prompt_tokens: { id: number[]; text: string[] }
  prompt_length: number
  rewards: Record<string, number>
  session: string
  tokens: number
  cut: { offset: number; limit: number; more: boolean }
  segments: Segment[]
  training: TrainingSums | null
  training_fault: string
  life: LifeEvent[]
  siblings: string[]
  tokenizer_fault: string | null
}

export interface Group {
  group: string
  prompt_id: string
  prompt: string | null
  answer: string | null
  admitted_version: number | null
  mean_reward: number | null
  members: (TrajectoryLine & { text: string; text_cut: boolean; advantage: number | null })[]
}

export interface Tiles {
  start: number[]
  end: number[]
  category: number[]
  count: number[]
  busy: number[]
  version: number[]
  name: string[]
}

export interface Timeline {
  from: number
  to: number
  end: number
  spans: number
  in_window: number
  categories: string[]
  lanes: { role: string; machine: string; tiles: Tiles }[]
  marks: { at: number; kind: string; text: string; step: number | null }[]
}

export interface AskedPrompt {
  prompt_id: string
  prompt: string | null
  count: number
  mean: number
}

export interface Repeats {
  looked_at: number
  duplicate: number
  share: number
}

/** What an engine has shown of a version: `which` is newest (of the engine) or worst (of the run). */
export interface CanaryProof {
  engine: string
  version: number
  distance: number
  tolerance: number
  proven: boolean
  which: string
}

export interface Health {
  goodput: Record<string, unknown> | null
  selection_bias: Record<string, unknown> | null
  masked_groups: { groups: number; masked: number; tokens: number; signal: number; signal_others: number; of_signal: number } | null
  canary: CanaryProof[]
  roles: { role: string; working: number | null; waiting: Record<string, number>; outside: Record<string, number> }[]
  states: States
  verdicts: States
  stop_reasons: States
  truncation: { share: number | null; by_step: { step: number[]; share: Column } }
  reward_by_length: { from: number; to: number; count: number; mean: number | null; right: number | null }[]
  prompts: {
    asked: number
    never_solved: number
    always_solved: number
    sometimes: number
    never: AskedPrompt[]
    always: AskedPrompt[]
  }
  reasons: { state: string; reason: string; count: number }[]
  undecided: { state: string; reason: string; count: number }[]
  duplicates: { answers: Repeats; prompts: Repeats; said_often: { text: string; count: number }[] }
  indexed: number
}

export interface DiffToken {
  id: number
  text: string
  logprob: number | null
  version: number | null
}

export interface Diff {
  equal: boolean
  step: number | null
  fields: string[]
  policies: number[]
  text: string
  token: { trajectory: string; index: number; a: DiffToken | null; b: DiffToken | null } | null
  recipe: { key: string; a: unknown; b: unknown }[]
}

export interface StepEvent {
  step: number
  values: Record<string, number | null>
  x: Record<Axis, number | null>
}

export class Refused extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message)
  }
}

/** The reply's JSON. Refused with the server's message; status 0 means that no server answered. */
export function ask<T>(path: string, signal?: AbortSignal): Promise<T> {
  return answer<T>(path, { ...(signal && { signal }), headers: { accept: 'application/json' } }, signal)
}

/** Has the server do something; refused as what is asked. */
export function send<T>(path: string, body: unknown): Promise<T> {
  return answer<T>(path, { method: 'POST', headers: { 'content-type': 'application/json' }, body: JSON.stringify(body) })
}

async function answer<T>(path: string, request: RequestInit, signal?: AbortSignal): Promise<T> {
  let reply: Response
  try {
    reply = await fetch(path, request)
  } catch (error) {
    if (signal?.aborted) throw error
    throw new Refused('The server of stretto watch does not answer.', 0)
  }
  const body: unknown = await reply.json().catch(() => null)
  if (!reply.ok) throw new Refused(messageOf(body) ?? `The server answered with status ${reply.status}.`, reply.status)
  return body as T
}

function messageOf(body: unknown): string | undefined {
  const message = (body as { error?: { message?: unknown } } | null)?.error?.message
  return typeof message === 'string' ? message : undefined
}

export const runPath = (run: string): string => `/api/runs/${encodeURIComponent(run)}`

export function query(values: Record<string, string | number | undefined>): string {
  const present = Object.entries(values).filter(([, value]) => value !== undefined && value !== '')
  return new URLSearchParams(present.map(([key, value]) => [key, String(value)])).toString()
}
