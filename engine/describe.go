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
	kept, room := d.Regions[:0], newTokenRoom(len(regions), len(e.lanes))
	for i, r := range regions {
		if r.e != e {
			return nil, &OpError{Op: "describe region " + r.name,
				Err: fmt.Errorf("it is of another engine: %w", ErrBounds)}
		}
		tokens, err := room.tokens(r.mems)
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

// tokenRoom is where the tokens of many regions lie together, so that a description of
// thousands takes two allocations and not as many thousands.
type tokenRoom struct {
	lists [][]byte // of all regions, by lane
	bytes []byte
	lanes int
}

// tokenGuess is the size of most backends' tokens; a longer one costs an allocation.
const tokenGuess = 32

func newTokenRoom(regions, lanes int) *tokenRoom {
	return &tokenRoom{lists: make([][]byte, regions*lanes),
		bytes: make([]byte, 0, regions*lanes*tokenGuess), lanes: lanes}
}

// tokens returns those of a region, by lane.
func (room *tokenRoom) tokens(mems []driver.Memory) ([][]byte, error) {
	list := room.lists[:room.lanes:room.lanes]
	room.lists = room.lists[room.lanes:]
	for i, m := range mems {
		if m == nil {
			continue
		}
		start := len(room.bytes)
		all, err := m.AppendToken(room.bytes)
		if err != nil {
			return nil, err
		}
		if room.bytes = all; len(all) > start { // otherwise no peer reaches it by that lane
			list[i] = all[start:len(all):len(all)]
		}
	}
	return list, nil
}

// tokens returns those of one region, by lane.
func (e *Engine) tokens(mems []driver.Memory) ([][]byte, error) {
	return newTokenRoom(1, len(e.lanes)).tokens(mems)
}
