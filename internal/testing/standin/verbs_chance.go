// SPDX-License-Identifier: Apache-2.0

package standin

import (
	"math/rand/v2"
	"sync"
	"time"
)

// retryExceeded is enum ibv_wc_status' word for a peer that does not answer.
const retryExceeded = 12

// VerbsChance harms devices by chance, in ways that they recover from: acknowledgements that are
// lost or late, requests that fail, slowness, wires that are cut for some milliseconds. The same
// seed does the same harm in the same order.
type VerbsChance struct {
	f         *VerbsFabric
	near, far []int
	r         *rand.Rand
	cuts      sync.WaitGroup
}

// NewVerbsChance harms requests of the near devices, and cuts the wires of the far ones.
func NewVerbsChance(f *VerbsFabric, seed uint64, near, far []int) *VerbsChance {
	return &VerbsChance{f: f, near: near, far: far, r: rand.New(rand.NewPCG(seed, 2))}
}

// Harm does one of these, to begin after some more requests. One goroutine calls it.
func (c *VerbsChance) Harm() {
	d := c.f.Device(c.near[c.r.IntN(len(c.near))])
	d.Set("after", uint32(c.r.IntN(4)))
	switch c.r.IntN(6) {
	case 0:
		d.LoseNext(1 + c.r.IntN(3))
	case 1:
		d.DelayNext(1+c.r.IntN(2), time.Duration(c.r.IntN(5))*time.Millisecond)
	case 2:
		d.FailNext(1, retryExceeded)
	case 3:
		d.Set("delay_us", uint32(c.r.IntN(500)))
	case 4:
		far, pause := c.f.Device(c.far[c.r.IntN(len(c.far))]),
			time.Duration(c.r.IntN(10))*time.Millisecond
		far.SetLink(false)
		c.cuts.Go(func() {
			time.Sleep(pause)
			far.SetLink(true)
		})
	case 5:
		c.Rest()
	}
}

// Rest waits until all wires are whole, and ends slowness.
func (c *VerbsChance) Rest() {
	c.cuts.Wait()
	for _, i := range c.near {
		c.f.Device(i).Set("delay_us", 0)
	}
}
