// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"fmt"
)

// ErrMismatch matches every *MismatchError.
var ErrMismatch = errors.New("KV digests differ")

// MismatchError says which cells of an edge are not the same on both ends: none of the part
// that differ lie outside these heads and tokens. It is ErrMismatch.
type MismatchError struct {
	FromRank, ToRank int
	Layer            int
	Part             string
	Units            [2]int // heads or state units, from and to (excluded)
	Tokens           Span   // or positions of a state
}

// Error names the ranks, layer, part, heads and tokens.
func (e *MismatchError) Error() string {
	return fmt.Sprintf("layer %d, part %q, heads or units [%d, %d), tokens [%d, %d): receiving "+
		"rank %d does not have what sending rank %d has: %v", e.Layer, e.Part, e.Units[0],
		e.Units[1], e.Tokens.From, e.Tokens.To, e.ToRank, e.FromRank, ErrMismatch)
}

// Is makes it ErrMismatch.
func (e *MismatchError) Is(target error) bool { return target == ErrMismatch }

// Locate finds the first part of a layer whose digests differ on the two ends, and its least
// range of heads and of tokens outside which nothing does. It returns nil if no part differs,
// a *MismatchError, or what differ failed with. differ compares the digests of both ends (see
// Digester.Layer) within a scope. Locate calls it once for each part, and some four times for
// each doubling of heads and tokens; memory must not change meanwhile.
func (e *Edge) Locate(layer int, s Span, differ func(Scope) (bool, error)) error {
	if !e.Carries(layer) {
		return nil
	}
	i := e.at[layer] - 1
	asked := make(map[string]bool)
	for j := e.first[i]; j < e.first[i+1]; j++ {
		for n := range int(e.moves[j].parts.n) {
			part := e.plan.kinds[e.parts[e.moves[j].part+n]].part
			if asked[part] {
				continue
			}
			asked[part] = true
			if d, err := differ(Scope{Part: part}); err != nil || !d {
				if err != nil {
					return err
				}
				continue
			}
			return e.narrow(layer, part, s, differ)
		}
	}
	return nil
}

// narrow finds the heads of a part that differ, and then the tokens.
func (e *Edge) narrow(layer int, part string, s Span, differ func(Scope) (bool, error)) error {
	m := &MismatchError{FromRank: e.plan.from[e.From].Rank, ToRank: e.plan.to[e.To].Rank,
		Layer: layer, Part: part}
	units, tokens := e.extent(layer, part, s)
	units, err := least(units, func(r Span) (bool, error) {
		return differ(Scope{Part: part, Units: [2]int{int(r.From), int(r.To)}})
	})
	if err != nil {
		return err
	}
	m.Units = [2]int{int(units.From), int(units.To)}
	m.Tokens, err = least(tokens, func(r Span) (bool, error) {
		return differ(Scope{Part: part, Units: m.Units, Tokens: r})
	})
	if err != nil {
		return err
	}
	return m
}

// extent returns the units and tokens of a part that the edge moves.
func (e *Edge) extent(layer int, part string, s Span) (units, tokens Span) {
	i := e.at[layer] - 1
	for j := e.first[i]; j < e.first[i+1]; j++ {
		m := &e.moves[j]
		for n := range int(m.parts.n) {
			if e.plan.kinds[e.parts[m.part+n]].part != part {
				continue
			}
			if units.To == 0 {
				units.From = m.first
			}
			units = Span{min(units.From, m.first), max(units.To, m.first+m.units.n)}
			tokens.From, tokens.To = m.clip(s)
		}
	}
	return units, tokens
}

// least returns the least range outside which nothing differs, of one that does.
func least(r Span, differ func(Span) (bool, error)) (Span, error) {
	first, end := r.From, r.To-1 // the first that differs is the least n with differ([From, n])
	for first < end {
		mid := first + (end-first)/2
		d, err := differ(Span{r.From, mid + 1})
		switch {
		case err != nil:
			return r, err
		case d:
			end = mid
		default:
			first = mid + 1
		}
	}
	last, end := first, r.To-1 // and the last is the greatest n with differ([n, To))
	for last < end {
		mid := last + (end-last+1)/2
		d, err := differ(Span{mid, r.To})
		switch {
		case err != nil:
			return r, err
		case d:
			last = mid
		default:
			end = mid - 1
		}
	}
	return Span{first, last + 1}, nil
}
