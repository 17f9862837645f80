// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/sluicehq/sluice/driver"
)

// A choice is measured on the first entries of the first Move of its kind: performing a Move twice
// is performing it, since its sources do not change meanwhile.
const (
	measuredMax  = 16384 // entries
	measureTimes = 3     // of each variant, in turn, after one that warms up
	choicesMax   = 256   // kinds of Moves whose choice a Device keeps
	// runMin is from what length of runs on copy engines are worth a measurement: a call for
	// each takes some three microseconds (H100), in which a kernel moves 130 KB.
	runMin = 4 << 10
)

// class is a kind of Moves, among which one choice is right for all.
type class struct {
	entry, width [PartsMax]uint32
	ends         uint8 // which of them are the host's
	lists        uint8 // how wide they are
	count, run   uint8 // powers of two: entries, bytes of a run
	budget       Budget
}

// Explain says which variant a Move would be performed by, and why: what is known of every other
// one. It measures where Run would, which performs the Move's first entries. only is Run's.
func (d *Device) Explain(m *DeviceMove, b Budget, only string) (Choice, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	var a args
	if err := m.fill(&a, d); err != nil {
		return Choice{}, err
	}
	if only != "" {
		if _, err := d.plan(only, m, &a, b); err != nil {
			return Choice{}, err
		}
		return Choice{Variant: only, Why: "asked for", Candidates: []Candidate{{Variant: only}}},
			nil
	}
	c, err := d.choice(m, &a, b)
	if err != nil {
		return Choice{}, err
	}
	same := *c
	same.Candidates = slices.Clone(c.Candidates)
	return same, nil
}

// choose is the launch of the variant that serves best, or of that one. The caller holds d.mu.
func (d *Device) choose(m *DeviceMove, a *args, b Budget, only string) (Launch, error) {
	variant, why := only, "asked for"
	if only == "" {
		c, err := d.choice(m, a, b)
		if err != nil {
			return Launch{}, err
		}
		variant, why = c.Variant, c.Why
	}
	l, err := d.plan(variant, m, a, b)
	if err != nil {
		return Launch{}, err
	}
	l.Why = why
	return l, nil
}

// plan is the launch of a variant on this device, or why there is none.
func (d *Device) plan(variant string, m *DeviceMove, a *args, b Budget) (Launch, error) {
	l, err := a.plan(&d.card, b, variant)
	if err != nil || kernelOf(variant) != "" {
		return l, err
	}
	switch {
	case !d.moves.Copies:
		return Launch{}, unfit(variant, "the driver lacks copies that one need not wait for")
	case variant == VariantStaged:
		if _, why := m.stages(a); why != "" {
			return Launch{}, unfit(variant, why)
		}
		l.InFlight = ringBytes
	}
	return l, nil
}

// choice is that of the Move's kind, measured when the first of it comes.
func (d *Device) choice(m *DeviceMove, a *args, b Budget) (*Choice, error) {
	run := m.runBytes(a)
	k := m.class(a, b, run)
	if c := d.choices[k]; c != nil {
		return c, nil
	}
	c, err := d.decide(m, a, b, run)
	if err != nil {
		return nil, err
	}
	if !c.passing && len(d.choices) < choicesMax {
		d.choices[k] = c
	}
	return c, nil
}

func (m *DeviceMove) class(a *args, b Budget, run uint64) class {
	k := class{lists: uint8(a.flags & (dstWide | srcWide)), count: uint8(bits.Len64(a.count)),
		run: uint8(bits.Len64(run)), budget: b}
	for i := range m.Parts {
		p := &m.Parts[i]
		k.entry[i], k.width[i] = a.part[i].entry, a.part[i].width
		k.ends = k.ends<<2 | bit(p.Dst.Memory.host != nil)<<1 | bit(p.Src.Memory.host != nil)
	}
	k.lists |= bit(m.Dst.List.Memory != nil)<<4 | bit(m.Src.List.Memory != nil)<<5
	return k
}

func bit(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

// decide looks at every variant, and has those compete that serve.
func (d *Device) decide(m *DeviceMove, a *args, b Budget, run uint64) (*Choice, error) {
	if b != (Budget{}) {
		if err := b.check(VariantRows); err != nil {
			return nil, err
		}
		if err := a.aligned(); err != nil {
			return nil, err
		}
	}
	c := &Choice{}
	for _, v := range Variants() {
		p := Candidate{Variant: v}
		if _, err := d.plan(v, m, a, b); err != nil {
			p.Reason = reason(err)
		} else if p.Reason = d.needless(v, b, run); p.Reason == "" {
			p.serves = true
			if c.Variant == "" {
				c.Variant = v
			}
		}
		c.Candidates = append(c.Candidates, p)
	}
	if c.Variant == "" {
		c.explain()
		return nil, fmt.Errorf("no variant serves: %s: %w", c.Why, driver.ErrNotSupported)
	}
	if err := d.compete(c, m, a, b); err != nil {
		return nil, err
	}
	c.explain()
	return c, nil
}

// needless is why a variant that serves is not worth a measurement.
func (d *Device) needless(variant string, b Budget, run uint64) string {
	kernels := b != (Budget{})
	switch {
	case kernels && variant == VariantStaged:
		return "for a budget of no multiprocessor"
	case kernels && kernelOf(variant) == "" && run == 0:
		return "the list is in the card's memory, so how long its runs are is not known"
	case kernels && kernelOf(variant) == "" && run < runMin:
		return fmt.Sprintf("runs of about %d bytes are too short for a copy engine", run)
	}
	return ""
}

// compete measures, unless there is but one to choose from, or no entry to do so by.
func (d *Device) compete(c *Choice, m *DeviceMove, a *args, b Budget) error {
	var who []*Candidate
	for i := range c.Candidates {
		if c.Candidates[i].serves {
			who = append(who, &c.Candidates[i])
		}
	}
	if len(who) < 2 {
		return nil
	}
	first := *a
	first.count = min(a.count, measuredMax)
	times := make([][]time.Duration, len(who))
	var bytes uint64
	for n := range 1 + measureTimes {
		for i := range who {
			j := (i + n) % len(who)
			took, moved, err := d.time(who[j].Variant, m, &first, b)
			if err != nil {
				return fmt.Errorf("measure variant %s: %w", who[j].Variant, err)
			}
			bytes = moved * a.entries()
			if n > 0 {
				times[j] = append(times[j], took)
			}
		}
	}
	if bytes == 0 {
		c.Why, c.passing = "none of the entries moves, so nothing is measured", true
		return nil
	}
	for i, p := range who {
		slices.Sort(times[i])
		p.GBps = float64(bytes) / float64(max(times[i][measureTimes/2], 1))
	}
	c.take()
	return nil
}

// take makes the fastest the choice.
func (c *Choice) take() {
	best := 0.0
	for _, p := range c.Candidates {
		if p.GBps > best {
			best, c.Variant = p.GBps, p.Variant
		}
	}
}

// time performs a Move once, from call to end.
func (d *Device) time(variant string, m *DeviceMove, a *args, b Budget) (took time.Duration,
	moved uint64, err error) {
	l, err := d.plan(variant, m, a, b)
	if err != nil {
		return 0, 0, err
	}
	t := clean
	begin := time.Now()
	if err := d.perform(&l, m, a, &t); err != nil {
		return 0, 0, err
	}
	took = time.Since(begin)
	sum, err := t.sum(a.count)
	if errors.Is(err, driver.ErrBounds) {
		err = nil // whose Move it is will be told
	}
	return took, sum.Moved, err
}

// entries is how many bytes an index moves.
func (a *args) entries() (n uint64) {
	for k := range a.part[:a.parts] {
		n += uint64(a.part[k].entry)
	}
	return n
}

// sampled is how many pairs of neighbours runBytes looks at.
const sampled = 32

// runBytes is about how many bytes lie in one run on both sides; 0: a list is in the card's
// memory, which can be read only by the card.
func (m *DeviceMove) runBytes(a *args) uint64 {
	entry := uint64(a.part[0].entry)
	for k := range a.part[:a.parts] {
		p := &a.part[k]
		if p.dstStride != uint64(p.entry) || p.srcStride != uint64(p.entry) {
			return entry
		}
	}
	var lists [2]Index
	for i, x := range [...]*DeviceIndex{&m.Dst, &m.Src} {
		if x.List.Memory == nil {
			continue
		}
		if x.List.Memory.host == nil {
			return 0
		}
		lists[i] = x.view()
	}
	if lists[0].len()+lists[1].len() == 0 || a.count < 2 {
		return a.count * entry
	}
	pairs, near := min(a.count-1, sampled), uint64(0)
	for n := range pairs {
		i := n * (a.count - 1) / pairs
		if lists[0].near(i) && lists[1].near(i) {
			near++
		}
	}
	if near == pairs {
		return a.count * entry
	}
	return min(a.count, pairs/(pairs-near)) * entry
}

// near reports whether the places of entries i and i+1 are neighbours.
func (x *Index) near(i uint64) bool {
	this, _ := x.at(i)
	next, _ := x.at(i + 1)
	return next == this+1
}
