/** Numbers as people read them. */
export function number(value: unknown, digits = 3): string {
  if (typeof value !== 'number' || !Number.isFinite(value)) return '–'
  if (Number.isInteger(value)) return value.toLocaleString('en')
  const size = Math.abs(value)
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(digits - 1)
  return value.toLocaleString('en', { maximumSignificantDigits: Math.max(digits, String(Math.floor(size)).length) })
}

export function percent(value: number | null | undefined): string {
  return typeof value === 'number' ? `${(100 * value).toFixed(1)} %` : '–'
}

export function duration(seconds: number | null | undefined): string {
  if (typeof seconds !== 'number') return '–'
  if (seconds < 1e-3) return `${number(seconds * 1e6)} µs`
  if (seconds < 1) return `${number(seconds * 1e3)} ms`
  if (seconds < 120) return `${number(seconds)} s`
  const minutes = Math.floor(seconds / 60)
  return minutes < 120 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`
}

export function words(name: string): string {
  return name.replace(/_/g, ' ')
}

export function setting(value: unknown): string {
  return value === null || value === undefined ? 'not set' : typeof value === 'string' ? value : JSON.stringify(value)
}
