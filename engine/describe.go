// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/wire"
)

// Describe returns the bytes with which a peer connects and reaches regions:
// those named, or all that are registered when none is. Send it over any channel
// that you trust: a program that has it can reach those regions. It grows by about 30
// bytes a region and backend.
func (e *Engine) Describe(regions ...*Region) ([]byte, error) {
	if len(regions) > 0 {
		return e.encode(e.describe(regions), regions, false)
	}
	regions = e.visible()
	return e.encode(e.describe(regions), regions, true)
}

// encode adds the tokens of regions to their description. Those that were closed since may be left
// out.
func (e *Engine) encode(d *wire.Description, regions []*Region, leaveOut bool) ([]byte, error) {
	kept := d.Regions[:0]
	for i, r := range regions {
		if r.e != e {
			return nil, &OpError{Op: "describe region " + r.name,
				Err: fmt.Errorf("it is of another engine: %w", ErrBounds)}
		}
		tokens, err := e.tokens(r.mems)
		if errors.Is(err, ErrClosed) && leaveOut {
			continue
		}
		if err != nil {
			return nil, &OpError{Op: "describe region " + r.name, Err: err}
		}
		d.Regions[i].Pack(tokens)
		kept = append(kept, d.Regions[i])
	}
	d.Regions = kept
	b, err := wire.Encode(nil, d)
	if err != nil {
		return nil, &OpError{Op: "describe", Err: err}
	}
	return b, nil
}

// visible returns the regions that Describe tells of, by name.
func (e *Engine) visible() []*Region {
	e.mu.Lock()
	defer e.mu.Unlock()
	list := make([]*Region, 0, len(e.regions))
	for _, r := range e.regions {
		if !r.private && r.mems != nil {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(a, b *Region) int { return strings.Compare(a.name, b.name) })
	return list
}

func (e *Engine) describe(regions []*Region) *wire.Description {
	d := &wire.Description{Engine: e.id, Host: e.host, Name: e.cfg.Name, NotifyMax: e.cfg.NotifyMax,
		Regions: make([]wire.Region, len(regions))}
	for _, l := range e.lanes {
		d.Backends = append(d.Backends, wire.Backend{Name: l.caps.Name, Addr: l.b.Addr()})
	}
	for i, r := range regions {
		d.Regions[i] = wire.Region{Name: r.name, Kind: r.seg.Kind, ReadOnly: r.seg.ReadOnly,
			Size: r.seg.Len}
	}
	return d
}

// tokenGuess is the size of most backends' tokens; a longer one costs an allocation.
const tokenGuess = 32

// tokens returns those of one region, by lane.
func (e *Engine) tokens(mems []driver.Memory) ([][]byte, error) {
	list, all := make([][]byte, len(mems)), make([]byte, 0, len(mems)*tokenGuess)
	for i, m := range mems {
		if m == nil {
			continue
		}
		start := len(all)
		var err error
		if all, err = m.AppendToken(all); err != nil {
			return nil, err
		}
		if len(all) > start { // otherwise no peer reaches it by that lane
			list[i] = all[start:len(all):len(all)]
		}
	}
	return list, nil
}
