// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"
)

// Curves are the times of an instance, in nanoseconds.
type Curves struct {
	// Prefill is the time to compute a prompt of n tokens of which the first p are cached: a part
	// whatever they are, a part for each of n-p, and a part for each of n*n-p*p.
	Prefill [3]float64
	// Decode is the time of a step: a part whatever it has, a part for each sequence, and a part
	// for each token of their contexts.
	Decode [3]float64
}

// DefaultCurves are of LLaMA3-70B on eight A800: see docs/simulate.md, which derives them.
func DefaultCurves() Curves {
	return Curves{Prefill: [3]float64{12.6e6, 121e3, 2.69}, Decode: [3]float64{10.3e6, 145e3, 23.9}}
}

// Where a product is converted below, no processor may round it together with the sum that it goes
// into: all have the same times.

// prefill is how long it takes to compute a prompt of which a part is cached.
func (c *Curves) prefill(tokens, cached int) time.Duration {
	n, p := float64(tokens), float64(cached)
	return nanoseconds(c.Prefill[0] + float64(c.Prefill[1]*(n-p)) + float64(c.Prefill[2]*(n*n-p*p)))
}

// steps is how long n steps of a batch take that has so many tokens of context before the first.
func (c *Curves) steps(n int64, batch int, context int64) time.Duration {
	f, b := float64(n), float64(batch)
	first := c.Decode[0] + float64(c.Decode[1]*b) + float64(c.Decode[2]*float64(context))
	return nanoseconds(float64(f*first) + c.Decode[2]*b*f*(f-1)/2)
}

// stepsWithin is the least number of steps that take at least so long.
func (c *Curves) stepsWithin(long time.Duration, batch int, context int64) int64 {
	if long <= 0 {
		return 0
	}
	first := c.Decode[0] + c.Decode[1]*float64(batch) + c.Decode[2]*float64(context)
	// long = n*first + grow*n*(n-1)/2
	grow := c.Decode[2] * float64(batch)
	a, b := grow/2, first-grow/2
	n := float64(long) / first
	if a > 0 {
		n = 2 * float64(long) / (b + math.Sqrt(b*b+4*a*float64(long)))
	}
	steps := int64(math.Ceil(n))
	for c.steps(steps, batch, context) < long { // what the rounding has taken
		steps++
	}
	for steps > 0 && c.steps(steps-1, batch, context) >= long {
		steps--
	}
	return steps
}

// nanoseconds is a time that is within bounds.
func nanoseconds(ns float64) time.Duration {
	return time.Duration(math.Round(min(ns, float64(longest))))
}

// longest is the longest time of anything: a hundred years.
const longest = 100 * 365 * 24 * time.Hour

// later is a time behind another one, up to the longest.
func later(at, by time.Duration) time.Duration { return min(at+by, longest) }

// ErrCurves is wrapped by the errors about curves.
var ErrCurves = errors.New("bad curves")

func (c *Curves) check() error {
	for name, list := range map[string][3]float64{"prefill": c.Prefill, "decode": c.Decode} {
		for _, v := range list {
			if !(v >= 0 && v <= 1e15) {
				return fmt.Errorf("%s has a part of %v ns, want 0 to 1e15: %w", name, v, ErrCurves)
			}
		}
		if list[0]+list[1] < 1 {
			return fmt.Errorf("%s takes no time: give it a fixed part, or one for each token or "+
				"sequence: %w", name, ErrCurves)
		}
	}
	return nil
}

// point is a line of measured times: of a prefill, or of a decode step.
type point struct {
	Tokens, Cached *float64
	Batch, Context *float64
	MS             *float64
}

// PointLines are lines of a file of measured times.
const PointLines = `{"tokens":8192,"cached":0,"ms":1200} for a prefill, ` +
	`{"batch":16,"context":131072,"ms":21} for a step`

const (
	pointsMax    = 1 << 16
	pointLineMax = 4 << 10
)

// FitCurves reads measured times, a JSON object a line, and returns the curves that are nearest to
// them, by their relative error, and the largest such error. Curves of which there are no points
// stay what they are in base.
func FitCurves(r io.Reader, base Curves) (c Curves, off float64, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, pointLineMax), pointLineMax)
	var rows [2][][4]float64 // of prefill and decode: what the parts are taken by, and the time
	line := 0
	for lines.Scan() {
		line++
		text := bytes.TrimSpace(lines.Bytes())
		if len(text) == 0 {
			continue
		}
		which, row, err := parsePoint(text)
		if err == nil && len(rows[which]) == pointsMax {
			err = fmt.Errorf("more than %d points", pointsMax)
		}
		if err != nil {
			return c, 0, fmt.Errorf("line %d: %w: %w", line, err, ErrCurves)
		}
		rows[which] = append(rows[which], row)
	}
	if err := lines.Err(); err != nil {
		return c, 0, fmt.Errorf("line %d: %w", line+1, err)
	}
	if len(rows[0])+len(rows[1]) == 0 {
		return c, 0, fmt.Errorf("no points: %w", ErrCurves)
	}
	c = base
	for which, to := range []*[3]float64{&c.Prefill, &c.Decode} {
		if len(rows[which]) == 0 {
			continue
		}
		parts, worst := fit(rows[which])
		*to, off = parts, max(off, worst)
	}
	return c, off, c.check()
}

// parsePoint reads one measured time.
func parsePoint(text []byte) (which int, row [4]float64, err error) {
	var p point
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&p); err != nil {
		return 0, row, err
	}
	value := func(v *float64) float64 {
		if v == nil {
			return 0
		}
		return *v
	}
	n, cached, batch, context := value(p.Tokens), value(p.Cached), value(p.Batch), value(p.Context)
	ns := 1e6 * value(p.MS)
	row = [4]float64{1, n - cached, n*n - cached*cached, ns}
	switch isStep := p.Batch != nil || p.Context != nil; {
	case (p.Tokens != nil || p.Cached != nil) == isStep, d.More():
		return 0, row, errors.New("want tokens, cached and ms, or batch, context and ms")
	case isStep:
		which, row = 1, [4]float64{1, batch, context, ns}
	}
	switch {
	case !(ns > 0 && ns <= 1e15):
		return 0, row, errors.New("want ms above 0, at most 1e9")
	case which == 0 && !(n >= 1 && n <= 1<<26 && cached >= 0 && cached < n):
		return 0, row, errors.New("want tokens of 1 to 67108864, and cached below them")
	case which == 1 && !(batch >= 1 && batch <= 1<<20 && context >= 0 && context <= 1<<40):
		return 0, row, errors.New("want a batch of 1 to 1048576 and a context of 0 to 1e12")
	}
	return which, row, nil
}

// fit returns the parts, none below 0, by which the sum of squares of the relative errors is least,
// and the largest of these errors. It tries all sets of parts that may be above 0.
func fit(rows [][4]float64) (parts [3]float64, worst float64) {
	least := math.Inf(1)
	for set := 1; set < 1<<3; set++ {
		try, ok := solve(rows, set)
		if !ok {
			continue
		}
		squares, largest := 0.0, 0.0
		for _, r := range rows {
			e := (try[0]*r[0]+try[1]*r[1]+try[2]*r[2])/r[3] - 1
			squares, largest = squares+e*e, max(largest, math.Abs(e))
		}
		if squares < least-1e-12 { // of equal ones the first
			least, parts, worst = squares, try, largest
		}
	}
	return parts, worst
}

// solve solves the normal equations for the parts of a set. It reports false where they have no
// single solution, or one below 0.
func solve(rows [][4]float64, set int) (parts [3]float64, ok bool) {
	var m [3][4]float64
	var scale [3]float64 // so that no column is far larger than another
	for _, r := range rows {
		for k := range scale {
			scale[k] = max(scale[k], r[k]/r[3])
		}
	}
	for k := range m {
		if set>>k&1 == 0 || scale[k] == 0 {
			if set>>k&1 == 1 {
				return parts, false
			}
			m[k][k] = 1
			continue
		}
		for _, r := range rows {
			x := r[k] / r[3] / scale[k]
			for l := range m {
				if set>>l&1 == 1 && scale[l] > 0 {
					m[k][l] += x * r[l] / r[3] / scale[l]
				}
			}
			m[k][3] += x
		}
	}
	for k := range m { // Gauss and Jordan; the matrix is positive definite, or singular
		if m[k][k] < 1e-9 {
			return parts, false
		}
		for l := range m {
			if by := m[l][k] / m[k][k]; l != k {
				for at := range m[l] {
					m[l][at] -= float64(by * m[k][at])
				}
			}
		}
	}
	for k := range m {
		if set>>k&1 == 1 {
			parts[k] = m[k][3] / m[k][k] / scale[k]
		}
		if parts[k] < 0 {
			return parts, false
		}
	}
	return parts, true
}
