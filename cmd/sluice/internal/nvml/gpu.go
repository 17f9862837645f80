// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux

package nvml

import (
	"fmt"
	"math/bits"

	"github.com/sluicehq/sluice/csrc/nvml"
	"github.com/sluicehq/sluice/internal/topology"
)

// card is one GPU that a session asks for.
type card struct {
	session
	nvml.Device
}

// gpu asks for one card. A card that has fallen off the bus is still listed.
func (s *session) gpu(index int) GPU {
	g := GPU{Index: index, Node: -1, State: -1, Absent: []string{}}
	note := func(what string) { g.Absent = append(g.Absent, what) }
	d, ret := s.library.Device(s.newest("nvmlDeviceGetHandleByIndex", "_v2"), index)
	if ret != nvml.Success {
		note("nvmlDeviceGetHandleByIndex: " + s.library.Word(ret))
		return g
	}
	c := card{session{s.library, note}, d}
	c.text(&g.Name, "nvmlDeviceGetName")
	c.text(&g.UUID, "nvmlDeviceGetUUID")
	c.bus(&g)
	c.node(&g)
	c.link(&g)
	c.memory(&g)
	c.modes(&g)
	return g
}

func (c *card) text(to *string, function string) {
	if t, ret := c.Text(function); c.answered(function, ret) {
		*to = t
	}
}

func (c *card) number(to *int, function string) {
	if n, ret := c.Number(function); c.answered(function, ret) {
		*to = n
	}
}

func (c *card) bus(g *GPU) {
	function := c.newest("nvmlDeviceGetPciInfo", "_v3", "_v2")
	domain, bus, device, ret := c.Bus(function)
	if c.answered(function, ret) {
		g.Bus = topology.Address(fmt.Sprintf("%x:%02x:%02x.0", domain, bus, device))
	}
}

// nodesMax is how many NUMA nodes are asked for.
const nodesMax = 512

// node finds the node whose memory is nearest.
func (c *card) node(g *GPU) {
	const function = "nvmlDeviceGetMemoryAffinity"
	set, ret := c.Nodes(function, nodesMax/bits.UintSize)
	if !c.answered(function, ret) {
		return
	}
	for i, word := range set {
		if word != 0 {
			g.Node = i*bits.UintSize + bits.TrailingZeros(word)
			return
		}
	}
}

func (c *card) link(g *GPU) {
	c.number(&g.Link.Gen, "nvmlDeviceGetCurrPcieLinkGeneration")
	c.number(&g.Link.Width, "nvmlDeviceGetCurrPcieLinkWidth")
	c.number(&g.Most.Width, "nvmlDeviceGetMaxPcieLinkWidth")
	const ofGPU = "nvmlDeviceGetGpuMaxPcieLinkGeneration" // the other is of the card in this slot
	if c.library.Has(ofGPU) {
		c.number(&g.Most.Gen, ofGPU)
	}
	if g.Most.Gen == 0 {
		c.number(&g.Most.Gen, "nvmlDeviceGetMaxPcieLinkGeneration")
	}
}

func (c *card) memory(g *GPU) {
	const function, compute = "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability"
	if total, free, ret := c.Memory(function); c.answered(function, ret) {
		g.MemoryTotal, g.MemoryFree = total, free
	}
	if major, minor, ret := c.Pair(compute); c.answered(compute, ret) {
		g.Compute = fmt.Sprintf("%d.%d", major, minor)
	}
}

// stateUnknown is NVML's.
const stateUnknown = 32

func (c *card) modes(g *GPU) {
	c.number(&g.State, "nvmlDeviceGetPerformanceState")
	if g.State == stateUnknown {
		g.State = -1
	}
	const mig = "nvmlDeviceGetMigMode"
	if now, after, ret := c.Pair(mig); c.answered(mig, ret) {
		g.MIG = migText(now == 1, after == 1)
	}
}

func migText(now, after bool) string {
	words := map[bool]string{true: "enabled", false: "disabled"}
	if now == after {
		return words[now]
	}
	return words[now] + ", " + words[after] + " after a reset"
}
