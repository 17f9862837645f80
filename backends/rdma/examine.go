// SPDX-License-Identifier: Apache-2.0

package rdma

import (
	"errors"
	"fmt"
	"strings"

	"github.com/sluicehq/sluice/csrc/verbs"
	"github.com/sluicehq/sluice/driver"
)

// Findings are what this machine has for a Config, and what is wrong with it.
type Findings struct {
	Library  string          `json:"library"` // that was loaded
	Devices  []DeviceFinding `json:"devices"`
	Memlock  MemlockFinding  `json:"memlock"`
	Nodes    int             `json:"nodes"` // of NUMA; 0: not known, or one
	Problems []Problem       `json:"problems"`
}

// DeviceFinding is one device.
type DeviceFinding struct {
	Name  string        `json:"name"`
	Node  int           `json:"node"` // of NUMA; -1: not known
	Bus   string        `json:"bus"`  // its PCI address; empty: none, as with soft-RoCE
	Path  []string      `json:"path"` // of PCI addresses from the root to it
	Ports []PortFinding `json:"ports"`
}

// PortFinding is one port. Chosen says that a Backend of this Config opens it.
type PortFinding struct {
	Name      string       `json:"name"` // as Config.Devices spells it
	Chosen    bool         `json:"chosen"`
	State     string       `json:"state"`
	Physical  string       `json:"physical"`
	LinkLayer string       `json:"link_layer"`
	Rate      string       `json:"rate"`
	LID       uint16       `json:"lid"`
	MTU       int          `json:"mtu"` // bytes that a packet of it holds; 0: not known
	GIDs      []GIDFinding `json:"gids"`
	Problems  []Problem    `json:"problems"`

	named bool // by Config.Devices, which may be all
}

// GIDFinding is one GID, and what the rule says of it.
type GIDFinding struct {
	Index   int    `json:"index"`
	Address string `json:"address"` // IPv4 where it is one
	Type    string `json:"type"`
	NetDev  string `json:"netdev"`
	Subnet  string `json:"subnet"`
	Chosen  bool   `json:"chosen"`
	Why     string `json:"why"`
}

// MemlockFinding is how much memory this process may pin.
type MemlockFinding struct {
	Unlimited bool   `json:"unlimited"`
	Limit     uint64 `json:"limit"` // bytes
	Used      uint64 `json:"used"`  // bytes
}

// Problem is something that is wrong, and what mends it.
type Problem struct {
	What string `json:"what"`
	Fix  string `json:"fix"` // may be empty
}

// memlockLow is below what any KV cache needs.
const memlockLow = 1 << 30

// Examine looks at what a Config names, or at all there is. It opens no port of the network
// and pins nothing. The error is a *driver.UnavailableError where no backend can be
// opened; the findings are good all the same.
func Examine(cfg Config) (f Findings, err error) {
	return examine(cfg, func(c *Config) error {
		if err := verbs.Load(c.Library); err != nil {
			return err
		}
		_, err := verbs.Devices()
		return err
	})
}

func examine(cfg Config, load func(*Config) error) (f Findings, err error) {
	cfg.EnsureDefaults()
	if err := cfg.check(); err != nil {
		return f, fmt.Errorf("rdma: %w", err)
	}
	list, err := splitDevices(cfg.Devices)
	if err != nil {
		return f, fmt.Errorf("rdma: %w", err)
	}
	f.Library = cfg.Library
	if f.Library == "" {
		f.Library = "libibverbs.so.1"
	}
	f.Nodes = len(cfg.sysfs.nodes())
	f.Memlock = examineMemlock()
	all := cfg.sysfs.devices(nil)
	chosen := 0
	for i := range all {
		f.Devices = append(f.Devices, cfg.examineDevice(&all[i], list, &chosen))
	}
	err = load(&cfg)
	if err == nil && chosen == 0 {
		err = f.unusable(list)
	}
	f.summarize(list, err)
	return f, err
}

func examineMemlock() MemlockFinding {
	m := thisMemlock()
	limit, used, limited := m.limits()
	return MemlockFinding{Unlimited: m.exempt || !limited, Limit: limit, Used: used}
}

func (c *Config) examineDevice(d *Device, list []wanted, chosen *int) DeviceFinding {
	out := DeviceFinding{Name: d.Name, Node: d.Node, Path: d.Path}
	if len(d.Path) > 0 {
		out.Bus = d.Path[len(d.Path)-1]
	}
	for i := range d.Ports {
		p := &d.Ports[i]
		want, named := findWanted(list, d, p)
		found := c.examinePort(d, p, want)
		found.named = named
		if named && len(found.Problems) == 0 && *chosen < c.Rails {
			found.Chosen = true
			*chosen++
		}
		out.Ports = append(out.Ports, found)
	}
	return out
}

// findWanted returns which GID is asked for, and whether the port is asked for at all.
func findWanted(list []wanted, d *Device, p *Port) (gid int, named bool) {
	for i := range list {
		if list[i].names(d, p) {
			return list[i].gid, true
		}
	}
	return -1, len(list) == 0
}

func (c *Config) examinePort(d *Device, p *Port, gid int) PortFinding {
	out := PortFinding{
		Name: fmt.Sprintf("%s:%d", d.Name, p.Number), State: p.State, Physical: p.Physical,
		LinkLayer: p.LinkLayer, Rate: p.RateText, LID: p.LID,
	}
	best, choices, err := chooseGID(p, gid)
	for i := range choices {
		g := &choices[i]
		found := GIDFinding{Index: g.Index, Address: g.Address.Unmap().String(), Type: g.Type,
			NetDev: g.NetDev, Chosen: g.Chosen, Why: g.Why}
		if g.Subnet.IsValid() {
			found.Subnet = g.Subnet.Masked().String()
		}
		out.GIDs = append(out.GIDs, found)
	}
	if !p.Active() {
		out.Problems = append(out.Problems, Problem{fmt.Sprintf("the port is %s (%s)", p.State,
			p.Physical), linkFix(p)})
	}
	if err != nil {
		out.Problems = append(out.Problems, Problem{unwrapped(err), "give its network device an " +
			"address, or name a GID in Config.Devices"})
	} else if best.NetDev != "" {
		up, mtu := c.sysfs.state(best.NetDev)
		out.MTU = packetMTU(mtu)
		if !up && mtu > 0 {
			out.Problems = append(out.Problems, Problem{"its network device " + best.NetDev +
				" is down", "ip link set " + best.NetDev + " up"})
		}
	}
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

// unwrapped says an error without the sentinel at its end.
func unwrapped(err error) string {
	return strings.TrimSuffix(err.Error(), ": "+driver.ErrNoRoute.Error())
}

// unusable says why no port was chosen.
func (f *Findings) unusable(list []wanted) error {
	if len(f.Devices) == 0 {
		return unavailable("no RDMA device", softFix)
	}
	for i := range list {
		if !f.has(&list[i]) {
			return unavailable(fmt.Sprintf("there is no %v; there are %s", list[i], f.names()),
				"choose Config.Devices among these")
		}
	}
	for _, d := range f.Devices {
		for _, p := range d.Ports {
			if p.named && len(p.Problems) > 0 {
				return unavailable(p.Name+": "+p.Problems[0].What, p.Problems[0].Fix)
			}
		}
	}
	return unavailable("no device has a port", "")
}

func (f *Findings) has(w *wanted) bool {
	for _, d := range f.Devices {
		for _, p := range d.Ports {
			if d.Name == w.device && (w.port == 0 || p.Name == fmt.Sprintf("%s:%d", w.device,
				w.port)) {
				return true
			}
		}
	}
	return false
}

func (f *Findings) names() string {
	var names []string
	for _, d := range f.Devices {
		for _, p := range d.Ports {
			names = append(names, p.Name)
		}
	}
	return strings.Join(names, ", ")
}

// summarize collects what is wrong with the machine as a whole.
func (f *Findings) summarize(list []wanted, err error) {
	var u *driver.UnavailableError
	if errors.As(err, &u) {
		f.Problems = append(f.Problems, Problem{u.Reason, u.Fix})
	}
	if !f.Memlock.Unlimited && f.Memlock.Limit < memlockLow {
		f.Problems = append(f.Problems, Problem{fmt.Sprintf("only %d bytes may be pinned "+
			"(RLIMIT_MEMLOCK)", f.Memlock.Limit), memlockFix})
	}
	for i := range list {
		if err == nil && !f.has(&list[i]) {
			f.Problems = append(f.Problems, Problem{fmt.Sprintf("Config.Devices names %v, which "+
				"is not there", list[i]), "there are " + f.names()})
		}
	}
}
