// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/driver"
	"github.com/sluicehq/sluice/internal/topology"
)

// Findings are the ports that this machine has for a Config, and what is wrong with each.
type Findings struct {
	Devices []DeviceFinding
	Nodes   int // of NUMA; 0: not known, or one
}

// DeviceFinding is one device.
type DeviceFinding struct {
	Name  string
	Node  int      // of NUMA; -1: not known
	Bus   string   // its PCI address; empty: none, as with soft-RoCE
	Path  []string // of PCI addresses from the root to it
	Ports []PortFinding
}

// PortFinding is one port. Chosen says that a Backend of this Config opens it.
type PortFinding struct {
	Name      string // as Config.Devices spells it
	State     string
	LinkLayer string
	Rate      string
	MTU       int // bytes that a packet of it holds; 0: not known
	Chosen    bool
	GIDs      []GIDChoice
	Problems  []Problem
}

// Problem is something that is wrong, and what mends it.
type Problem struct {
	What string
	Fix  string // may be empty
}

// Examine looks at what the kernel tells of devices. It opens nothing, not even libibverbs. The
// error is that of a Config that New refuses.
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

// examinePort chooses a port that is named, or all are, unless something is wrong with it.
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

// packetMTU is what fits in a frame of an Ethernet device: RoCE's own sizes.
func packetMTU(frame int) int {
	const headers = 58 // of IPv4, UDP, the transport and its checksum, at most
	for _, n := range []int{4096, 2048, 1024, 512, 256} {
		if frame >= n+headers {
			return n
		}
	}
	return 0
}
