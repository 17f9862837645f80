// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// Findings lists the RDMA ports of this machine, with the problems of each.
type Findings struct {
	Devices []DeviceFinding
	Nodes   int // number of NUMA nodes; 0: one, or unknown
}

// DeviceFinding is one device.
type DeviceFinding struct {
	Name  string
	Node  int      // NUMA node; -1: unknown
	Bus   string   // PCI address; empty: none, as with soft-RoCE
	Path  []string // PCI addresses from the root to the device
	Ports []PortFinding
}

// PortFinding is one port.
type PortFinding struct {
	Name      string // as it is written in Config.Devices
	State     string
	LinkLayer string
	Rate      string
	MTU       int  // payload bytes of a packet; 0: unknown
	Chosen    bool // a Backend with this Config opens the port
	GIDs      []GIDChoice
	Problems  []Problem
}

// Problem is a problem of a port, and its fix.
type Problem struct {
	What string
	Fix  string // may be empty
}

// Examine reads the state of all RDMA devices from the kernel. It opens nothing, not even
// libibverbs. It fails only for a Config that New refuses.
func Examine(cfg Config) (f Findings, err error) {
	cfg.EnsureDefaults()
	list, err := splitDevices(cfg.Devices)
	if err = errors.Join(cfg.check(), err); err != nil {
		return f, fmt.Errorf("rdma: %w", err)
	}
	f.Nodes = len(topology.Sysfs(cfg.sysfs.root).Nodes())
	chosen := 0
	for _, d := range cfg.sysfs.devices() {
		found := DeviceFinding{Name: d.Name, Node: d.Node, Path: d.Path}
		if len(d.Path) > 0 {
			found.Bus = d.Path[len(d.Path)-1]
		}
		for i := range d.Ports {
			p := cfg.examinePort(&d, &d.Ports[i], list)
			if p.Chosen = p.Chosen && chosen < cfg.Rails; p.Chosen {
				chosen++
			}
			found.Ports = append(found.Ports, p)
		}
		f.Devices = append(f.Devices, found)
	}
	return f, nil
}

// examinePort examines one port. It chooses the port if Config.Devices selects it, or is empty, and
// the port has no problem.
func (c *Config) examinePort(d *Device, p *Port, list []wanted) PortFinding {
	named, gid := len(list) == 0, -1
	for i := range list {
		if list[i].names(d, p) {
			named, gid = true, list[i].gid
			break
		}
	}
	out := PortFinding{Name: fmt.Sprintf("%s:%d", d.Name, p.Number), State: p.State,
		LinkLayer: p.LinkLayer, Rate: p.RateText}
	problem := func(what, fix string) { out.Problems = append(out.Problems, Problem{what, fix}) }
	best, choices, err := chooseGID(p, gid)
	out.GIDs = choices
	if !p.Active() {
		problem(fmt.Sprintf("the port is %s (%s)", p.State, p.Physical), linkFix(p))
	}
	if err != nil {
		problem(strings.TrimSuffix(err.Error(), ": "+driver.ErrNoRoute.Error()), gidFix)
	} else if best.NetDev != "" {
		up, mtu := c.sysfs.state(best.NetDev)
		out.MTU = packetMTU(mtu)
		if !up && mtu > 0 {
			problem("its network device "+best.NetDev+" is down", "ip link set "+best.NetDev+" up")
		}
	}
	out.Chosen = named && len(out.Problems) == 0
	return out
}

// packetMTU returns the largest RoCE payload size that fits into a frame of an Ethernet device.
func packetMTU(frame int) int {
	const headers = 58 // of IPv4, UDP, the transport and its checksum, at most
	for _, n := range []int{4096, 2048, 1024, 512, 256} {
		if frame >= n+headers {
			return n
		}
	}
	return 0
}
