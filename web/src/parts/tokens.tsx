import type { JSX } from 'preact'
import { memo } from 'preact/compat'
import { useMemo, useState } from 'preact/hooks'

import type { Segment, Trajectory } from '../data/api'
import { FATES, type Tint, TINTS, type Tinting, tinting } from '../data/tints'
import { number } from '../data/words'
import { LongText, pieces, Untrusted } from './text'

/** A trajectory as coloured tokens, turn by turn. The numbers of the token under the pointer, or reached with the arrow keys, stand beside it. */
export function Tokens({ trajectory, tint, chat }: { trajectory: Trajectory; tint: Tint; chat: boolean }): JSX.Element {
  const { segments } = trajectory
  const [current, setCurrent] = useState<string | null>(null)
  const places = useMemo(() => segments.flatMap((segment, row) => segment.tokens.id.map((_, index) => `${row}:${index}`)), [segments])
  const colours = useMemo(() => tinting(tint, segments), [tint, segments])
  const point = (event: Event): void => {
    const place = (event.target as HTMLElement).closest<HTMLElement>('[data-at]')?.dataset['at']
    if (place) setCurrent(place)
  }
  const pressed = (event: KeyboardEvent): void => {
    const move = event.key === 'ArrowRight' ? 1 : event.key === 'ArrowLeft' ? -1 : 0
    if (!move) return
    event.preventDefault()
    const next = current === null ? 0 : places.indexOf(current) + move
    const place = places[Math.min(places.length - 1, Math.max(0, next))]
    if (place === undefined) return
    setCurrent(place)
    document.querySelector(`[data-at="${place}"]`)?.scrollIntoView({ block: 'nearest' })
  }
  return (
    <div class="reading">
      <div class="tokens" tabIndex={0} role="group" aria-label="Tokens; the arrow keys go from one to the next" onMouseOver={point} onClick={point} onKeyDown={pressed}>
        {trajectory.prompt_text !== null && (
          <section class={chat ? 'turn prompt' : 'run-on prompt'} aria-label="Prompt">
            {chat && <h3>prompt</h3>}
            <LongText text={trajectory.prompt_text} cut={trajectory.prompt_cut} />
          </section>
        )}
        {segments.map((segment, row) => (
          <Turn key={segment.index} segment={segment} row={row} colours={colours} chat={chat} current={current?.startsWith(`${row}:`) ? Number(current.split(':')[1]) : -1} />
        ))}
      </div>
      <aside aria-label="The token" aria-live="polite">
        <Legend colours={colours} tint={tint} />
        <Numbers segments={segments} at={current} />
      </aside>
    </div>
  )
}

interface TurnProps {
  segment: Segment
  row: number
  colours: Tinting
  chat: boolean
  current: number
}

const Turn = memo(function Turn({ segment, row, colours, chat, current }: TurnProps): JSX.Element {
  return (
    <section class={chat ? `turn ${segment.sampled ? 'sampled' : 'given'}` : 'run-on'} aria-label={`${segment.role}, turn ${segment.index}`} data-role={segment.role}>
      {chat && (
        <h3>
          {segment.role}
          <span class="quiet">
            {segment.engines.map(([engine, count]) => ` · ${count} tokens by ${engine}`).join('')}
            {segment.reward !== null && ` · reward ${number(segment.reward)}`}
            {segment.parent !== null && ` · branches from ${segment.parent === -1 ? 'the prompt' : segment.parent === -2 ? 'nothing' : `turn ${segment.parent}`}`}
            {segment.cause && ` (${segment.cause})`}
          </span>
        </h3>
      )}
      <div class="untrusted block">
        {segment.tokens.text.map((text, index) => {
          const colour = colours.colour(segment, index)
          return (
            <span key={index} class={`token${index === current ? ' current' : ''}`} data-testid="token" data-at={`${row}:${index}`} style={colour ?? {}}>
              {text ? pieces(text) : <span class="control">·</span>}
            </span>
          )
        })}
      </div>
      {segment.calls.map((call, index) => (
        <p class="call" key={index}>
          calls{' '}
          <code>
            <Untrusted text={call.name} />
          </code>{' '}
          with <Untrusted text={call.arguments} />
        </p>
      ))}
    </section>
  )
})

function Legend({ colours, tint }: { colours: Tinting; tint: Tint }): JSX.Element {
  if (!colours.legend.length) return <p class="quiet">Nothing on record: {TINTS[tint]}.</p>
  return (
    <p class="legend">
      {TINTS[tint]}:{' '}
      {colours.legend.map(({ label, colour }) => (
        <span key={label}>
          <span class="swatch" style={{ background: colour }} aria-hidden="true" /> {label}{' '}
        </span>
      ))}
    </p>
  )
}

function Numbers({ segments, at }: { segments: Segment[]; at: string | null }): JSX.Element {
  const [row, index] = (at ?? '').split(':').map(Number)
  const segment = row === undefined ? undefined : segments[row]
  if (!segment || index === undefined) return <p class="quiet">Point at a token to see its numbers.</p>
  const { tokens } = segment
  const first = segment.offset
  const facts: [string, JSX.Element | string][] = [
    ['text', <Untrusted text={tokens.text[index] ?? ''} />],
    ['id', String(tokens.id[index])],
    ['place', number(first + index)],
    ['turn', `${segment.index}, ${segment.role}`],
    ['version', number(tokens.version?.[index])],
    ['staleness', number(tokens.staleness?.[index])],
    ['log-probability', number(tokens.logprob?.[index], 5)],
    ["trainer's", number(tokens.trainer_logprob?.[index], 5)],
    ['trainer − engine', number(tokens.difference?.[index], 5)],
    ['ratio', number(tokens.ratio?.[index], 5)],
    ['advantage', number(tokens.advantage?.[index], 5)],
    ['in training', FATES[tokens.fate?.[index] ?? ''] ?? '–'],
  ]
  return (
    <dl class="settings" data-token={at}>
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  )
}
