// SPDX-License-Identifier: Apache-2.0

package layout

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/csrc/digest"
	"github.com/sluicehq/sluice/driver"
)

// card is a Summer of memory that has numbers for addresses.
type card struct {
	memory [][]byte
	calls  int
	err    error
}

func (c *card) SumCells(list []digest.DeviceCells) (sum Digest, err error) {
	c.calls++
	for i := range list {
		d := &list[i]
		one, err := digest.Sum(c.memory[d.Memory.Addr][:d.Memory.Len], &d.Cells, d.Key)
		if err != nil {
			return Digest{}, err
		}
		sum.Add(one)
	}
	return sum, c.err
}

// TestDigestOfDeviceMemory: regions of devices beside DRAM have the digests that DRAM has, by one
// call a layer.
func TestDigestOfDeviceMemory(t *testing.T) {
	each(t, 60, func(t *testing.T, r *rand.Rand) {
		spec, place := anySpec(r)
		h := handOver(t, r, group(t, spec, place()), group(t, spec, place()), span(r, 40))
		for i := range h.to.sides {
			for _, e := range h.plan.Edges(i) {
				c := &card{memory: h.to.memory[e.To]}
				held := Held{Receiver: true, Summer: c, Tables: h.to.tables[e.To], Span: h.s}
				far, some := 0, 0
				for n, b := range c.memory {
					held.Device = append(held.Device, DeviceMemory{Addr: uint64(n),
						Len: uint64(len(b))})
					if r.IntN(4) > 0 {
						b, far = nil, far+1
					}
					held.Memory = append(held.Memory, b)
				}
				for _, l := range e.Layers {
					got, err := h.d.Layer(&e, l, &held, Scope{})
					require.NoError(t, err)
					require.Equal(t, h.sum(t, &e, l, true, Scope{}), got, "layer %d", l)
					if got.Cells > 0 {
						some++
					}
				}
				require.LessOrEqual(t, c.calls, some)
				if far == len(c.memory) {
					require.Equal(t, some, c.calls)
				}
			}
		}
	})
}

// TestDigestOfDeviceMemoryErrors: those of the Summer are told, with the layer.
func TestDigestOfDeviceMemoryErrors(t *testing.T) {
	spec := gqa(2, 2, 8)
	h := handOver(t, random(t, 1), group(t, spec, Placement{BlockTokens: 4, Blocks: 12}),
		group(t, spec, Placement{BlockTokens: 6, Blocks: 12}), Span{3, 40})
	e := &h.plan.Edges(0)[0]
	c := &card{memory: h.to.memory[0]}
	held := Held{Receiver: true, Memory: make([][]byte, 1), Tables: h.to.tables[0], Span: h.s}
	_, err := h.d.Layer(e, 1, &held, Scope{})
	require.ErrorIs(t, err, driver.ErrNotSupported, "no Summer")
	held.Summer = c
	_, err = h.d.Layer(e, 1, &held, Scope{})
	require.ErrorIs(t, err, driver.ErrNotSupported, "no region of a device")
	held.Device = []DeviceMemory{{Len: uint64(len(c.memory[0])) / 2}}
	_, err = h.d.Layer(e, 1, &held, Scope{})
	require.ErrorIs(t, err, driver.ErrBounds)
	require.ErrorContains(t, err, "layer 1 in memory of a device")
	held.Device[0].Len, c.err = uint64(len(c.memory[0])), errors.New("broken")
	_, err = h.d.Layer(e, 1, &held, Scope{})
	require.ErrorIs(t, err, c.err)
}
