/** The filter of the table of trajectories: clauses joined by `and`, in the words of docs/how_to/report.md. */
export interface Clause {
  field: string
  sign: string
  value: string
}

const CLAUSE = /^\s*([a-z]+)\s*(!=|<=|>=|=|<|>|~)\s*(.*?)\s*$/

/** The clauses of a filter as far as they can be read; the server says what is wrong with the rest. */
export function clauses(where: string): Clause[] {
  return split(where).flatMap((text) => {
    const found = CLAUSE.exec(text)
    return found ? [{ field: found[1] ?? '', sign: found[2] ?? '', value: found[3] ?? '' }] : []
  })
}

function split(where: string): string[] {
  return (where.match(/(?:"(?:\\.|[^"\\])*"|(?!\s+and\s)[^"]|")+/gi) ?? []).map((part) => part.replace(/^\s*and\s+/i, ''))
}

export function valueOf(where: string, field: string, sign: string): string {
  const value = clauses(where).find((clause) => clause.field === field && clause.sign === sign)?.value ?? ''
  return value.startsWith('"') ? value.slice(1, value.endsWith('"') ? -1 : undefined).replace(/\\(.)/g, '$1') : value
}

/** The filter with one clause changed, added, or, without a value, taken out. */
export function changed(where: string, field: string, sign: string, value: string): string {
  const kept = clauses(where).filter((clause) => clause.field !== field || clause.sign !== sign)
  const quoted = /^[\w.+-]+(\|[\w.+-]+)*$/.test(value) && sign !== '~' ? value : `"${value.replace(/["\\]/g, '\\$&')}"`
  if (value !== '') kept.push({ field, sign, value: quoted })
  return kept.map((clause) => `${clause.field}${clause.sign}${clause.value}`).join(' and ')
}
