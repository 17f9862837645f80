// SPDX-License-Identifier: Apache-2.0

package ucx

import (
	"bufio"
	"fmt"
	stdnet "net" // tests have a net of their own
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	ucp "github.com/sluicehq/sluice/csrc/ucx"
	"github.com/sluicehq/sluice/driver"
)

// Findings are what UCX has for a Config on this machine.
type Findings struct {
	Version string // of libucp, as in "1.13.1"
	Library string // its file; empty: not known
	// Transports of the network, and the devices that they use.
	Transports, Devices []string
	// names in Config.Transports and Config.Devices that this machine has not
	Absent []string
}

// known are the transports that may be there unasked.
var known = []string{"tcp", "rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5"}

// Version loads the library at a path, or the system's, and says which UCX it is.
func Version(library string) (string, error) {
	if err := ucp.Load(library); err != nil {
		return "", err
	}
	return ucp.Version(), nil
}

// Examine tries what a Config names, or all that is known, each alone: UCX ignores
// in silence a name that it does not know beside one that it does. An error is a
// *driver.UnavailableError, or says what is wrong with the Config.
func Examine(cfg Config) (f Findings, err error) {
	cfg.EnsureDefaults()
	list, err := networkTransports(cfg.Transports)
	if err != nil {
		return f, err
	}
	if f.Version, err = Version(cfg.Library); err != nil {
		return f, err
	}
	f.Library = loadedFile()
	f.try(&cfg, list)
	return f, nil
}

// try finds the transports and the devices.
func (f *Findings) try(cfg *Config, list string) {
	if rest, negated := strings.CutPrefix(list, "^"); negated {
		f.Transports, _ = tryEach(without(known, strings.Split(rest, ",")))
	} else {
		f.Transports, f.Absent = tryEach(strings.Split(list, ","))
	}
	if len(f.Transports) == 0 {
		return
	}
	if cfg.Devices == "" {
		f.Devices = slices.DeleteFunc(networkDevices(), func(d string) bool {
			return !opens(list, d)
		})
		return
	}
	for device := range strings.SplitSeq(cfg.Devices, ",") {
		if opens(list, device) {
			f.Devices = append(f.Devices, device)
		} else {
			f.Absent = append(f.Absent, device)
		}
	}
}

// without takes off what a negated list of UCX_TLS names, aliases included.
func without(names, gone []string) []string {
	return slices.DeleteFunc(slices.Clone(names), func(name string) bool {
		family, _, _ := strings.Cut(name, "_")
		return slices.Contains(gone, name) || slices.Contains(gone, family) || family != "tcp" &&
			slices.Contains(gone, "ib")
	})
}

// tryEach parts names of transports by whether UCX opens each alone.
func tryEach(names []string) (there, absent []string) {
	for _, name := range names {
		if opens(name, "") {
			there = append(there, name)
		} else {
			absent = append(absent, name)
		}
	}
	return there, absent
}

func opens(transports, devices string) bool {
	u, err := openUCX(ucp.Config{Transports: transports, Devices: devices, Workers: 1,
		BatchesMax: 2, NotifyMax: 1,
		SegmentMax: 4096, GraceNanos: uint64(graceMin), WakeFD: -1, ControlFD: -1})
	if err != nil {
		return false
	}
	return u.Close() == nil
}

// networkDevices lists what UCX may call a device, the way UCX spells it.
func networkDevices() (names []string) {
	interfaces, _ := stdnet.Interfaces() // none is an answer
	for _, i := range interfaces {
		if i.Flags&stdnet.FlagUp != 0 {
			names = append(names, i.Name)
		}
	}
	ports, _ := filepath.Glob("/sys/class/infiniband/*/ports/*") // the only error is a bad pattern
	for _, port := range ports {
		card := filepath.Base(filepath.Dir(filepath.Dir(port)))
		names = append(names, card+":"+filepath.Base(port))
	}
	return names
}

// loadedFile is where libucp was found.
func loadedFile() string {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return ""
	}
	defer maps.Close()
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		if i := strings.IndexByte(lines.Text(), '/'); i >= 0 &&
			strings.HasPrefix(filepath.Base(lines.Text()[i:]), "libucp") {
			return lines.Text()[i:]
		}
	}
	return ""
}

// Elsewhere is the Config as a peer on another host sees it: without the loopback device.
func (c Config) Elsewhere() (Config, error) {
	f, err := Examine(c)
	if err != nil {
		return c, err
	}
	devices := slices.DeleteFunc(f.Devices, func(d string) bool {
		i, err := stdnet.InterfaceByName(d)
		return err == nil && i.Flags&stdnet.FlagLoopback != 0
	})
	if len(f.Transports) == 0 || len(devices) == 0 {
		return c, &driver.UnavailableError{Backend: "ucx", Reason: "no transport and network " +
			"device that leads to another host",
			Fix: "choose transports and devices that `ucx_info -d` lists"}
	}
	c.Transports, c.Devices = strings.Join(f.Transports, ","), strings.Join(devices, ",")
	return c, nil
}

// Explain implements driver.Peer.
func (p *peer) Explain(localKey, remoteKey uint32) string {
	if p.enter() != nil {
		return "ucx: the peer is gone"
	}
	defer p.gate.Exit()
	p.mu.Lock()
	_, known := p.imports[remoteKey]
	p.mu.Unlock()
	if !known || p.b.table.At(localKey) == nil {
		return "ucx: unknown key"
	}
	where := "another host, or apart by namespaces or user"
	if p.owner.host == p.b.address.host {
		where = "this host, which ucx reaches over the network like any other: the shm backend " +
			"is for peers of one host, add it on both sides"
	}
	return fmt.Sprintf("%s; served by the owner's thread, message by message%s", where,
		lanesOf(p.link.Lanes()))
}

// usedLane is a transport of an endpoint with its device, and what UCX uses it for: "am" are
// messages, "rma_bw" is rendezvous.
type usedLane struct {
	name string
	uses []string
}

func (l *usedLane) String() string {
	if len(l.uses) == 0 {
		return l.name
	}
	return l.name + " (" + strings.Join(l.uses, " ") + ")"
}

// overTCP reports whether the messages of an endpoint go over TCP.
func overTCP(lanes string) bool {
	return slices.ContainsFunc(parseLanes(lanes), func(l usedLane) bool {
		return strings.HasPrefix(l.name, "tcp/") && slices.Contains(l.uses, "am")
	})
}

// lanesOf names the lanes of an endpoint.
func lanesOf(text string) string {
	var names []string
	for _, l := range parseLanes(text) {
		names = append(names, l.String())
	}
	if len(names) == 0 {
		return ""
	}
	return "; lanes " + strings.Join(names, ", ")
}

// parseLanes reads what UCX prints of an endpoint, lines such as
//
//	lane[0]: 1:sysv/memory.0 md[1] -> md[1]/sysv/sysdev[255] am am_bw#0
func parseLanes(text string) (lanes []usedLane) {
	for line := range strings.Lines(text) {
		at, uses, ok := strings.Cut(line, "->")
		from := strings.Fields(strings.TrimLeft(at, "# "))
		to := strings.Fields(uses)
		if !ok || len(from) < 2 || len(to) == 0 || !strings.HasPrefix(from[0], "lane[") {
			continue
		}
		_, name, _ := strings.Cut(from[1], ":")
		if i := strings.LastIndexByte(name, '.'); i > 0 {
			name = name[:i] // which path of the device
		}
		lane := usedLane{name: name}
		if len(to) > 1 {
			lane.uses = to[1:]
		}
		lanes = append(lanes, lane)
	}
	return lanes
}

// What was tried out for one eager message. The segment leaves room for the
// headers of UCX and ours.
const (
	segmentMax      = 60 << 10
	tcpSendBytes    = 64 << 10
	tcpReceiveBytes = 128 << 10
)

// sharing are UCX's names of transports within one host, aliases at the end.
var sharing = []string{"posix", "sysv", "cma", "self", "xpmem", "knem", "sm", "shm", "mm"}

// networkTransports is Config.Transports without those that share memory, as UCX_TLS takes it. A
// leading ^ negates a whole list, as in UCX.
func networkTransports(list string) (string, error) {
	rest, negated := strings.CutPrefix(strings.TrimSpace(list), "^")
	var names []string
	for name := range strings.SplitSeq(rest, ",") {
		name = strings.TrimSpace(name)
		if name == "" || strings.ContainsAny(name, "^ =") {
			return "", fmt.Errorf("config: Transports %q: %q is no name of a transport: %w", list,
				name, driver.ErrBounds)
		}
		if !slices.Contains(sharing, name) {
			names = append(names, name)
		}
	}
	switch {
	case negated:
		return "^" + strings.Join(append(slices.Clone(sharing[:6]), names...), ","), nil
	case slices.Contains(names, "all"):
		return "^" + strings.Join(sharing[:6], ","), nil
	case len(names) == 0:
		return "", fmt.Errorf("config: Transports %q shares memory, which is the shm backend's "+
			"work: use that, or add tcp: %w", list, driver.ErrBounds)
	}
	return strings.Join(names, ","), nil
}

// listed reports whether a transport may be chosen from a list of UCX_TLS.
func listed(list, name string) bool {
	rest, negated := strings.CutPrefix(list, "^")
	return slices.Contains(strings.Split(rest, ","), name) != negated
}

// context is what the context is opened with. Nothing goes by rendezvous: UCX would make the
// copy later than we look at how old a message is, and from memory of the program.
func (c *Config) context(transports string) ucp.Config {
	u := ucp.Config{
		Transports: transports, Devices: c.Devices,
		Workers: c.Workers, BatchesMax: c.BatchesMax, NotifyMax: c.NotifyMax,
		SegmentMax: segmentMax, SpinNanos: uint64(c.Spin), GraceNanos: uint64(c.Grace),
		Settings: []string{"RNDV_THRESH=inf"},
	}
	if listed(transports, "tcp") {
		u.Settings = append(u.Settings, "TCP_TX_SEG_SIZE="+strconv.Itoa(tcpSendBytes),
			"TCP_RX_SEG_SIZE="+strconv.Itoa(tcpReceiveBytes))
	}
	u.Settings = append(u.Settings, c.Settings...)
	return u
}
