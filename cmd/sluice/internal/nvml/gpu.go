// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux && !nonvml

package nvml

import (
	"fmt"
	"math/bits"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/sluicehq/sluice/internal/topology"
)

// gpu asks for one card. A card that has fallen off the bus is still listed.
func (s *session) gpu(index int) GPU {
	g := GPU{Index: index, Node: -1, State: -1, Absent: []string{}}
	of := *s
	of.note = func(what string) { g.Absent = append(g.Absent, what) }
	d, ret := s.api.DeviceGetHandleByIndex(index)
	if ret != nvml.SUCCESS {
		of.note("nvmlDeviceGetHandleByIndex: " + ret.Error())
		return g
	}
	of.ask("nvmlDeviceGetName", func() (ret nvml.Return) { g.Name, ret = d.GetName(); return })
	of.ask("nvmlDeviceGetUUID", func() (ret nvml.Return) { g.UUID, ret = d.GetUUID(); return })
	of.bus(&g, d)
	of.node(&g, d)
	of.link(&g, d)
	of.memory(&g, d)
	of.modes(&g, d)
	return g
}

func (s *session) bus(g *GPU, d nvml.Device) {
	symbol := "nvmlDeviceGetPciInfo" // the first has shorter fields, but all that is needed here
	for _, newer := range []string{"_v3", "_v2"} {
		if s.has("nvmlDeviceGetPciInfo" + newer) {
			symbol += newer
			break
		}
	}
	s.ask(symbol, func() nvml.Return {
		info, ret := d.GetPciInfo()
		if ret == nvml.SUCCESS {
			g.Bus = topology.Address(fmt.Sprintf("%x:%02x:%02x.0", info.Domain, info.Bus,
				info.Device))
		}
		return ret
	})
}

// nodesMax is how many NUMA nodes are asked for. go-nvml makes room for eight times as many.
const nodesMax = 64

// node finds the node whose memory is nearest.
func (s *session) node(g *GPU, d nvml.Device) {
	s.ask("nvmlDeviceGetMemoryAffinity", func() nvml.Return {
		set, ret := d.GetMemoryAffinity(nodesMax, nvml.AFFINITY_SCOPE_NODE)
		for i, word := range set {
			if ret == nvml.SUCCESS && word != 0 {
				g.Node = i*bits.UintSize + bits.TrailingZeros(word)
				break
			}
		}
		return ret
	})
}

func (s *session) link(g *GPU, d nvml.Device) {
	s.ask("nvmlDeviceGetCurrPcieLinkGeneration", func() (ret nvml.Return) {
		g.Link.Gen, ret = d.GetCurrPcieLinkGeneration()
		return
	})
	s.ask("nvmlDeviceGetCurrPcieLinkWidth", func() (ret nvml.Return) {
		g.Link.Width, ret = d.GetCurrPcieLinkWidth()
		return
	})
	s.ask("nvmlDeviceGetMaxPcieLinkWidth", func() (ret nvml.Return) {
		g.Most.Width, ret = d.GetMaxPcieLinkWidth()
		return
	})
	const ofGPU = "nvmlDeviceGetGpuMaxPcieLinkGeneration" // the other is of the card in this slot
	if s.has(ofGPU) && s.ask(ofGPU, func() (ret nvml.Return) {
		g.Most.Gen, ret = d.GetGpuMaxPcieLinkGeneration()
		return
	}) {
		return
	}
	s.ask("nvmlDeviceGetMaxPcieLinkGeneration", func() (ret nvml.Return) {
		g.Most.Gen, ret = d.GetMaxPcieLinkGeneration()
		return
	})
}

func (s *session) memory(g *GPU, d nvml.Device) {
	s.ask("nvmlDeviceGetMemoryInfo", func() nvml.Return {
		m, ret := d.GetMemoryInfo()
		if ret == nvml.SUCCESS {
			g.MemoryTotal, g.MemoryFree = m.Total, m.Free
		}
		return ret
	})
	s.ask("nvmlDeviceGetCudaComputeCapability", func() nvml.Return {
		major, minor, ret := d.GetCudaComputeCapability()
		if ret == nvml.SUCCESS {
			g.Compute = fmt.Sprintf("%d.%d", major, minor)
		}
		return ret
	})
}

func (s *session) modes(g *GPU, d nvml.Device) {
	s.ask("nvmlDeviceGetPerformanceState", func() nvml.Return {
		state, ret := d.GetPerformanceState()
		if ret == nvml.SUCCESS && state != nvml.PSTATE_UNKNOWN {
			g.State = int(state)
		}
		return ret
	})
	s.ask("nvmlDeviceGetMigMode", func() nvml.Return {
		now, after, ret := d.GetMigMode()
		if ret == nvml.SUCCESS {
			g.MIG = migText(now == nvml.DEVICE_MIG_ENABLE, after == nvml.DEVICE_MIG_ENABLE)
		}
		return ret
	})
}

func migText(now, after bool) string {
	words := map[bool]string{true: "enabled", false: "disabled"}
	if now == after {
		return words[now]
	}
	return words[now] + ", " + words[after] + " after a reset"
}
