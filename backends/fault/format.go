// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"strconv"
	"strings"
)

// String returns the rules as Parse reads them, one a line.
func (r Rules) String() string {
	var b strings.Builder
	if r.Seed != 0 {
		fmt.Fprintf(&b, "seed %d\n", r.Seed)
	}
	for i := range r.List {
		b.WriteString(r.List[i].String())
		b.WriteByte('\n')
	}
	return b.String()
}

// String returns the rule as Parse reads it.
func (r Rule) String() string {
	var b strings.Builder
	b.WriteString(r.On.String())
	r.Size.format(&b, "size", sizeUnits)
	r.Peer.format(&b, "peer", nil)
	if r.After != 0 {
		fmt.Fprintf(&b, " after=%v", r.After)
	}
	if r.Before != 0 {
		fmt.Fprintf(&b, " before=%v", r.Before)
	}
	for _, n := range []struct {
		name string
		n    uint64
	}{{"skip", r.Skip}, {"every", r.Every}, {"most", r.Most}} {
		if n.n != 0 {
			fmt.Fprintf(&b, " %s=%d", n.name, n.n)
		}
	}
	if r.Chance != 0 {
		fmt.Fprintf(&b, " p=%s", strconv.FormatFloat(r.Chance, 'f', -1, 64))
	}
	b.WriteString(": " + r.Do.String())
	r.operands(&b)
	return b.String()
}

func (r Range) format(b *strings.Builder, name string, units []unit) {
	if r.Exact {
		fmt.Fprintf(b, " %s=%s", name, formatUnits(r.Min, units))
		return
	}
	if r.Min > 0 {
		fmt.Fprintf(b, " %s>=%s", name, formatUnits(r.Min, units))
	}
	if r.Max > 0 {
		fmt.Fprintf(b, " %s<=%s", name, formatUnits(r.Max, units))
	}
}

// operands writes what follows the name of the deed.
func (r *Rule) operands(b *strings.Builder) {
	f := r.Do.form()
	if f == nil {
		return
	}
	switch f.takes {
	case timing, span:
		fmt.Fprintf(b, " %v", r.Time)
		if r.Jitter != 0 {
			fmt.Fprintf(b, "±%v", r.Jitter)
		}
	case rate:
		b.WriteString(" " + formatUnits(r.Rate, rateUnits))
		if r.Burst != 0 {
			b.WriteString(" burst=" + formatUnits(r.Burst, sizeUnits))
		}
	case model:
		fmt.Fprintf(b, " %v %v %s", r.Time, r.PerPiece, formatUnits(r.Rate, rateUnits))
	case cause:
		b.WriteString(" " + nameOf(r.Err))
	}
}
