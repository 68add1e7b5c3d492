import type { Timeline } from './api'
import { halved, kind } from './palette'

/** How the timeline is drawn: pure functions of what the server said and of the window on it. */
export const LANE = 26
export const GAP = 6
export const TOP = 22
export const LABEL = 110

export interface Window {
  from: number
  to: number
}

export const heightOf = (timeline: Timeline): number => TOP + timeline.lanes.length * (LANE + GAP) + GAP

/** The lanes by name: of a run on several machines, each with its own before it. */
export function namesOf({ lanes }: Timeline): string[] {
  const several = new Set(lanes.map((lane) => lane.machine).filter(Boolean)).size > 1
  return lanes.map(({ role, machine }) => (several && machine ? `${machine}/${role}` : role))
}

/** A window of another width around the place `share` (0 to 1) of it, kept inside of the run. */
export function zoomed(window: Window, factor: number, share: number, end: number): Window {
  const width = Math.min(end, Math.max(1e-3, (window.to - window.from) * factor))
  const centre = window.from + share * (window.to - window.from)
  return inside(centre - share * width, width, end)
}

export function moved(window: Window, share: number, end: number): Window {
  const width = window.to - window.from
  return inside(window.from + share * width, width, end)
}

function inside(from: number, width: number, end: number): Window {
  const first = Math.min(Math.max(0, from), Math.max(0, end - width))
  return { from: first, to: first + width }
}

export function draw(context: CanvasRenderingContext2D, timeline: Timeline, window: Window, width: number, dark: boolean): void {
  const scale = (width - LABEL) / (window.to - window.from)
  const at = (seconds: number): number => LABEL + (seconds - window.from) * scale
  const ink = dark ? '#d7dde3' : '#20262c'
  context.clearRect(0, 0, width, heightOf(timeline))
  context.font = '12px system-ui, sans-serif'
  context.textBaseline = 'middle'
  const names = namesOf(timeline)
  timeline.lanes.forEach(({ tiles }, lane) => {
    const top = TOP + lane * (LANE + GAP)
    context.fillStyle = dark ? '#20272e' : '#eef1f4'
    context.fillRect(LABEL, top, width - LABEL, LANE)
    for (let index = 0; index < tiles.start.length; index++) {
      const left = Math.max(LABEL, at(tiles.start[index] ?? 0))
      const right = Math.min(width, at(tiles.end[index] ?? 0))
      if (right < LABEL || left > width) continue
      const merged = (tiles.count[index] ?? 1) > 1
      context.fillStyle = kind(tiles.category[index] ?? 0)
      context.globalAlpha = merged ? Math.max(0.25, filled(timeline, lane, index)) : 1
      const wide = Math.max(1, right - left - (right - left > 4 ? 1 : 0))
      context.fillRect(left, top, wide, LANE)
      if (halved(tiles.category[index] ?? 0)) {
        context.fillStyle = '#000000'
        context.fillRect(left, top + LANE / 2, wide, LANE / 2)
      }
      context.globalAlpha = 1
    }
    context.fillStyle = ink
    context.fillText(names[lane] ?? '', 4, top + LANE / 2, LABEL - 8)
  })
  drawMarks(context, timeline, at, width, ink)
}

/** The share of a merged tile in which there was work. */
function filled(timeline: Timeline, lane: number, index: number): number {
  const tiles = timeline.lanes[lane]?.tiles
  const width = (tiles?.end[index] ?? 0) - (tiles?.start[index] ?? 0)
  return width > 0 ? Math.min(1, (tiles?.busy[index] ?? 0) / width) : 1
}

function drawMarks(context: CanvasRenderingContext2D, timeline: Timeline, at: (seconds: number) => number, width: number, ink: string): void {
  let free = 0
  context.fillStyle = ink
  context.textAlign = 'center'
  for (const mark of timeline.marks) {
    const place = at(mark.at)
    if (place < LABEL || place > width) continue
    context.globalAlpha = mark.kind === 'step' ? 0.25 : 0.8
    context.fillRect(place, mark.kind === 'step' ? TOP - 4 : 0, 1, heightOf(timeline))
    context.globalAlpha = 1
    const text = mark.kind === 'step' ? String(mark.step ?? '') : mark.kind === 'death' ? '✕' : '◆'
    if (place < free) continue
    context.fillText(text, place, TOP / 2)
    free = place + context.measureText(text).width + 8
  }
  context.textAlign = 'start'
}

export interface Stretch {
  role: string
  name: string
  count: number
  busy: number
  versions: string
}

/** What a stretch holds, by role and name, out of the tiles that touch it. */
export function inStretch(timeline: Timeline, window: Window): Stretch[] {
  const found = new Map<string, { role: string; name: string; count: number; busy: number; low: number; high: number }>()
  const names = namesOf(timeline)
  timeline.lanes.forEach(({ tiles }, lane) => {
    const role = names[lane] ?? ''
    for (let index = 0; index < tiles.start.length; index++) {
      const [start = 0, end = 0, version = -1] = [tiles.start[index], tiles.end[index], tiles.version[index]]
      if (end < window.from || start > window.to) continue
      const name = tiles.name[index] ?? ''
      const row = found.get(`${role} ${name}`) ?? { role, name, count: 0, busy: 0, low: Infinity, high: -1 }
      const share = end > start ? (Math.min(end, window.to) - Math.max(start, window.from)) / (end - start) : 1
      row.count += tiles.count[index] ?? 1
      row.busy += share * (tiles.busy[index] ?? 0)
      if (version >= 0) row.low = Math.min(row.low, version)
      row.high = Math.max(row.high, version)
      found.set(`${role} ${name}`, row)
    }
  })
  return [...found.values()].map(({ low, high, ...row }) => ({ ...row, versions: high < 0 ? '–' : low === high ? `${high}` : `${low} to ${high}` }))
}
