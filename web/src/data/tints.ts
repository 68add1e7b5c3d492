import type { Segment } from './api'
import { amount, aroundZero, ink, kind } from './palette'
import { number } from './words'

/** What a token is coloured by. */
export const TINTS = {
  version: 'version',
  staleness: 'staleness',
  logprob: 'log-probability',
  difference: 'difference of trainer and engine',
  advantage: 'advantage',
  fate: 'what training did with it',
} as const
export type Tint = keyof typeof TINTS

/** What became of a token, in words. */
export const FATES: Record<string, string> = {
  trained: 'trained',
  clipped_high: 'clipped, ratio above 1',
  clipped_low: 'clipped, ratio below 1',
  masked_by_correction: 'masked by the correction',
  masked: 'masked, too old',
  skipped: 'its optimizer step was skipped',
  untrained: 'untrained',
  context: 'context, not sampled',
  pending: 'not trained yet',
}
const ORDER = Object.keys(FATES)

export type Colour = {
  background: string
  color: string
}

export interface Tinting {
  colour: (segment: Segment, index: number) => Colour | null
  legend: { label: string; colour: string }[]
}

/** How the tokens of these segments are coloured; an empty legend where nothing of the kind is on record. */
export function tinting(tint: Tint, segments: Segment[]): Tinting {
  if (tint === 'fate') return byFate(segments)
  const numbers = segments.flatMap((segment) => (segment.tokens[tint] ?? []).filter((value) => value !== null))
  if (numbers.length === 0) return { colour: () => null, legend: [] }
  const low = numbers.reduce((a, b) => Math.min(a, b))
  const high = numbers.reduce((a, b) => Math.max(a, b))
  const signed = tint === 'difference' || tint === 'advantage'
  const size = Math.max(Math.abs(low), Math.abs(high)) || 1
  const shade = (value: number): string => (signed ? aroundZero(0.5 + value / size / 2) : amount(high === low ? 1 : (value - low) / (high - low)))
  const ends = signed ? [-size, 0, size] : high === low ? [high] : [low, (low + high) / 2, high]
  return {
    colour: (segment, index) => {
      const value = segment.tokens[tint]?.[index]
      return typeof value === 'number' ? on(shade(value)) : null
    },
    legend: ends.map((value) => ({ label: number(value), colour: shade(value) })),
  }
}

function byFate(segments: Segment[]): Tinting {
  const present = ORDER.filter((fate) => segments.some((segment) => segment.tokens.fate?.includes(fate)))
  const colour = (fate: string): string => kind(Math.max(0, ORDER.indexOf(fate)))
  return {
    colour: (segment, index) => {
      const fate = segment.tokens.fate?.[index]
      return fate === undefined ? null : on(colour(fate))
    },
    legend: present.map((fate) => ({ label: FATES[fate] ?? fate, colour: colour(fate) })),
  }
}

function on(background: string): Colour {
  return { background, color: ink(background) }
}
