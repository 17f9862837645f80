// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluicehq/sluice/internal/topology"
)

// Device is what the kernel tells of an RDMA device.
type Device struct {
	Name  string
	Node  int      // of NUMA; -1: not known, or the same for all
	Path  []string // of PCI addresses, from the root to the device; empty: not on a bus
	Ports []Port
}

// Port is one port of a Device.
type Port struct {
	Number    int
	State     string  // "ACTIVE", "DOWN", "INIT", "ARMED"
	Physical  string  // "LinkUp", "Disabled", "Polling"
	LinkLayer string  // "Ethernet", "InfiniBand"
	RateText  string  // "100 Gb/sec (4X EDR)"
	Rate      float64 // bytes a second; 0: not known
	LID       uint16
	GIDs      []GID // those that are set
}

// GID is one address of a Port.
type GID struct {
	Index   int
	Address netip.Addr   // IPv6 form, IPv4 within it for RoCE over IPv4
	Type    string       // "RoCE v2", "IB/RoCE v1"
	NetDev  string       // of RoCE; empty: none
	Subnet  netip.Prefix // of that address on NetDev; not valid: NetDev has no such address
}

// Active reports whether bytes can pass.
func (p *Port) Active() bool { return p.State == "ACTIVE" }

// Ethernet reports whether it is RoCE.
func (p *Port) Ethernet() bool { return p.LinkLayer == "Ethernet" }

// sysfs is where the kernel tells of devices.
type sysfs struct {
	root string // "/sys"
	// addresses of a network device, with their subnets
	prefixes func(netdev string) []netip.Prefix
	state    func(netdev string) (up bool, mtu int) // its state
}

var thisMachine = &sysfs{root: "/sys", prefixes: prefixesOf, state: stateOf}

func prefixesOf(netdev string) (list []netip.Prefix) {
	i, err := net.InterfaceByName(netdev)
	if err != nil {
		return nil
	}
	addresses, err := i.Addrs()
	if err != nil {
		return nil
	}
	for _, a := range addresses {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			list = append(list, p)
		}
	}
	return list
}

func stateOf(netdev string) (up bool, mtu int) {
	i, err := net.InterfaceByName(netdev)
	if err != nil {
		return false, 0
	}
	return i.Flags&net.FlagUp != 0, i.MTU
}

func (s *sysfs) text(path ...string) string   { return topology.Sysfs(s.root).Text(path...) }
func (s *sysfs) there(path ...string) bool    { return topology.Sysfs(s.root).There(path...) }
func (s *sysfs) list(path ...string) []string { return topology.Sysfs(s.root).List(path...) }

const class = "class/infiniband"

// gidGap is how many GIDs in a row are not set before the rest is not looked at: a port may
// have a thousand, each of them three files, and the kernel hands out the first that is free.
const gidGap = 64

// devices lists those that are wanted; nil wants all.
func (s *sysfs) devices(wants func(name string) bool) (all []Device) {
	for _, name := range s.list(class) {
		if wants != nil && !wants(name) {
			continue
		}
		kernel := topology.Sysfs(s.root)
		d := Device{Name: name, Node: kernel.Node(class, name, "device"),
			Path: kernel.Path(class, name, "device")}
		for _, port := range s.list(class, name, "ports") {
			if number, err := strconv.Atoi(port); err == nil {
				d.Ports = append(d.Ports, s.port(name, number))
			}
		}
		s.borrow(&d)
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b Device) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// borrow takes the place of a device without one, as soft-RoCE is, from the network
// device that it sits on.
func (s *sysfs) borrow(d *Device) {
	if d.Node >= 0 || len(d.Path) > 0 {
		return
	}
	netdev := s.text(class, d.Name, "parent")
	if netdev == "" {
		return
	}
	kernel := topology.Sysfs(s.root)
	d.Node, d.Path = kernel.Node("class/net", netdev, "device"), kernel.Path("class/net", netdev,
		"device")
}

func (s *sysfs) port(device string, number int) Port {
	at := filepath.Join(class, device, "ports", strconv.Itoa(number))
	p := Port{
		Number: number, State: afterColon(s.text(at, "state")),
		Physical:  afterColon(s.text(at, "phys_state")),
		LinkLayer: s.text(at, "link_layer"), RateText: s.text(at, "rate"),
	}
	p.Rate = rateOf(p.RateText)
	if lid, err := strconv.ParseUint(s.text(at, "lid"), 0, 16); err == nil {
		p.LID = uint16(lid)
	}
	p.GIDs = s.gids(at)
	return p
}

// gids lists those of a port that are set.
func (s *sysfs) gids(at string) (list []GID) {
	gap := 0
	for _, name := range s.list(at, "gids") {
		index, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if gap++; gap > gidGap {
			break
		}
		address, err := netip.ParseAddr(s.text(at, "gids", name))
		if err != nil || address == netip.IPv6Unspecified() {
			continue
		}
		gap = 0
		g := GID{Index: index, Address: address, Type: s.text(at, "gid_attrs/types", name),
			NetDev: s.text(at, "gid_attrs/ndevs", name)}
		g.Subnet = s.subnet(&g)
		list = append(list, g)
	}
	return list
}

// subnet finds which network the address of a GID belongs to.
func (s *sysfs) subnet(g *GID) netip.Prefix {
	if g.NetDev == "" {
		return netip.Prefix{}
	}
	for _, p := range s.prefixes(g.NetDev) {
		if p.Addr().Unmap() == g.Address.Unmap() {
			return netip.PrefixFrom(p.Addr().Unmap(), p.Bits())
		}
	}
	return netip.Prefix{}
}

// afterColon takes the word out of "4: ACTIVE".
func afterColon(s string) string {
	if _, word, ok := strings.Cut(s, ":"); ok {
		return strings.TrimSpace(word)
	}
	return s
}

// rateOf reads "100 Gb/sec (4X EDR)" or "2.5 Gb/sec (1X SDR)".
func rateOf(text string) float64 {
	number, unit, _ := strings.Cut(text, " ")
	gigabits, err := strconv.ParseFloat(number, 64)
	if err != nil || !strings.HasPrefix(unit, "Gb/sec") || gigabits < 0 {
		return 0
	}
	return gigabits * 1e9 / 8
}
