import type { Axis, Column, Evaluation, RunDetail, Series, StepEvent } from './api'
import { FURTHER } from './further'
import sentences from './sentences.json'
import { words } from './words'

const KNOWN: Record<string, { sentence: string; unit: string }> = sentences
const DERIVED: Record<string, { sentence: string; unit: string }> = {
  evaluation: KNOWN['evaluation.accuracy'] ?? { sentence: '', unit: '' },
  masked_fraction: { sentence: '`masked_tokens` / (`masked_tokens` + `trained_tokens`) of the batch', unit: '0–1' },
  seconds_step: { sentence: '`rl_seconds` of this step minus that of the step before', unit: 's' },
  tokens_per_second: { sentence: '`trained_tokens` of the batch / `seconds_step`', unit: 'tokens/s' },
}

/** The curves of learning, in the order in which they are read; all others of a run are behind "More". */
export const FIRST = [
  'reward',
  'accuracy',
  'evaluation',
  'length_mean',
  'trainer.entropy',
  'trainer.behavior_logprob_error',
  'canary',
  'trainer.clip_fraction',
  'masked_fraction',
  'trainer.grad_norm',
  'staleness_mean',
] as const

const TITLES: Record<string, string> = { evaluation: 'held-out accuracy', canary: 'canary, of the worst engine' }

/** How to see whether one of them is good. */
const READ: Record<string, string> = {
  reward: 'Rises while the policy learns; flat from the start, it learns nothing.',
  accuracy: 'Rises with the reward. It swings with the prompts that were drawn.',
  evaluation: 'The goal: rises, then stays. A fall is harm, whatever the reward does.',
  length_mean: 'Changes slowly. A climb to the limit of tokens is bad.',
  'trainer.entropy': 'Falls slowly; near 0 the policy says the same each time.',
  'trainer.behavior_logprob_error': 'Near 0 and flat; when it rises, engine and trainer disagree.',
  canary: 'Far below 1 and flat: at 1 an engine does not compute with the weights of the trainer, and samples nothing.',
  'trainer.clip_fraction': 'Small and steady; large, the steps are too long.',
  masked_fraction: 'Small: what is masked was sampled in vain.',
  'trainer.grad_norm': 'Steady. 0 for long: nothing is learned. Ever larger: the run breaks.',
  staleness_mean: 'Below the bound; at it, generation waits.',
}

/** What a series means and its unit, in the words of docs/reference/metrics.md. */
export function meaning(name: string): { title: string; read: string | undefined; sentence: string; unit: string } {
  const family = name.split('.')[0] ?? name
  const found = DERIVED[name] ?? KNOWN[name] ?? KNOWN[family]
  const title = TITLES[name] ?? words(name.replace(/^trainer\./, ''))
  return { title, read: READ[name] ?? FURTHER[name] ?? READ[family] ?? FURTHER[family], sentence: found?.sentence ?? '', unit: found?.unit ?? '' }
}

export function firstOf(run: Pick<RunDetail, 'series'>): string[] {
  return FIRST.filter((name) => name === 'evaluation' || run.series.includes(name))
}

export interface Held {
  x: Column
  y: Column
  low: Column
  high: Column
}

/** The evaluations of one set over an axis; tokens and trajectories of the step after which they were started. */
export function heldOut(series: Series, axis: Axis, set = ''): Held {
  const chosen = series.evaluations.filter((evaluation) => evaluation.set === set)
  return {
    x: chosen.map((evaluation) => place(evaluation, series, axis)),
    y: chosen.map((evaluation) => evaluation.accuracy),
    low: chosen.map((evaluation) => evaluation.ci95?.[0] ?? null),
    high: chosen.map((evaluation) => evaluation.ci95?.[1] ?? null),
  }
}

function place(evaluation: Evaluation, series: Series, axis: Axis): number | null {
  if (axis === 'step' || axis === 'wall_seconds' || axis === 'rl_seconds') return evaluation[axis]
  if (evaluation.step === 0) return 0
  const at = series.x.step.findLastIndex((step) => step !== null && step <= evaluation.step)
  return series.x[axis][at] ?? null
}

/** The series with one more step, or null where the server has to be asked again: steps are merged, or one is missing. */
export function grown(series: Series, event: StepEvent): Series | null {
  const last = series.x.step[series.x.step.length - 1] ?? 0
  if (event.step <= last) return series
  if (series.bucket !== 1 || event.step !== last + 1 || series.points >= 5000) return null
  const x = { ...series.x }
  for (const axis of Object.keys(x) as Axis[]) x[axis] = [...x[axis], event.x[axis] ?? null]
  const entries = Object.entries(series.series).map(([name, { mean, min, max, newest }]) => {
    const value = event.values[name] ?? null
    return [name, { mean: [...mean, value], min: [...min, value], max: [...max, value], newest: value ?? newest }]
  })
  return { ...series, x, series: Object.fromEntries(entries) as Series['series'], steps: series.steps + 1, points: series.points + 1 }
}
