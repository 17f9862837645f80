// SPDX-License-Identifier: Apache-2.0

//go:build cgo && linux && !nonvml

package nvml

import (
	"fmt"
	"sync"

	"github.com/NVIDIA/go-nvml/pkg/dl"
	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/sluicehq/sluice/driver"
)

// session is one library, open and initialised.
type session struct {
	api  nvml.Interface
	has  func(symbol string) bool
	note func(what string) // of what the driver did not say
}

// loaded is the library of this process. Names are bound to it when they are first called,
// and for good, so it is never unloaded and never another one.
var loaded struct {
	sync.Mutex // held during Examine, too: go-nvml has state of the whole process
	path       string
	library    *dl.DynamicLibrary
	err        error // it lacks what is needed
}

// needed are functions without which nothing can be asked: one name of each.
var needed = [][]string{
	{"nvmlInit_v2", "nvmlInit"}, {"nvmlShutdown"}, {"nvmlErrorString"},
	{"nvmlDeviceGetCount_v2", "nvmlDeviceGetCount"},
	{"nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByIndex"},
}

// Examine asks the driver, through a library; empty means Library. A process may use one. The error
// is a *driver.UnavailableError where there is none, or no driver. It may take seconds where the
// driver has to wake up its cards, and may be called by any goroutine, one after the other.
func Examine(library string) (f Findings, err error) {
	if library == "" {
		library = Library
	}
	loaded.Lock()
	defer loaded.Unlock()
	if err := load(library); err != nil {
		return f, err
	}
	f.GPUs, f.Absent = []GPU{}, []string{}
	s := session{api: nvml.New(nvml.WithLibraryPath(library)), has: has, note: func(what string) {
		f.Absent = append(f.Absent, what)
	}}
	if ret := s.api.Init(); ret != nvml.SUCCESS {
		return f, unavailable(fmt.Sprintf("%s: %v", library, ret), initFix(ret))
	}
	defer func() {
		if ret := s.api.Shutdown(); ret != nvml.SUCCESS && err == nil {
			err = fmt.Errorf("nvml: shut down: %w", ret)
		}
	}()
	err = s.examine(&f)
	return f, err
}

// load opens the library before go-nvml does, so that a name can be looked for before anything is
// called.
func load(library string) error {
	if loaded.library != nil {
		if loaded.path != library {
			return fmt.Errorf("nvml: this process uses %s: %w", loaded.path, driver.ErrBusy)
		}
		return loaded.err
	}
	l := dl.New(library, dl.RTLD_LAZY|dl.RTLD_GLOBAL|dl.RTLD_NODELETE)
	if err := l.Open(); err != nil {
		return unavailable(err.Error(), installFix)
	}
	loaded.path, loaded.library = library, l
	for _, names := range needed {
		if !has(names[0]) && !has(names[len(names)-1]) {
			loaded.err = unavailable(fmt.Sprintf("%s has no %s", library, names[len(names)-1]),
				"install the whole NVIDIA driver of one version")
		}
	}
	return loaded.err
}

func has(symbol string) bool { return loaded.library.Lookup(symbol) == nil }

func initFix(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return "modprobe nvidia; containers: --gpus all"
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "reboot, or load the kernel modules again: they are of another version than " +
			"the library"
	case nvml.ERROR_NO_PERMISSION:
		return "give this user /dev/nvidia*"
	}
	return installFix
}

// ask makes one call, unless the library has not the function. It reports whether there is an
// answer.
func (s *session) ask(symbol string, call func() nvml.Return) bool {
	if !s.has(symbol) {
		s.note(symbol + ": not in this driver")
		return false
	}
	if ret := call(); ret != nvml.SUCCESS {
		s.note(symbol + ": " + ret.Error())
		return false
	}
	return true
}

func (s *session) examine(f *Findings) error {
	s.ask("nvmlSystemGetDriverVersion", func() (ret nvml.Return) {
		f.Driver, ret = s.api.SystemGetDriverVersion()
		return
	})
	s.ask("nvmlSystemGetNVMLVersion", func() (ret nvml.Return) {
		f.NVML, ret = s.api.SystemGetNVMLVersion()
		return
	})
	s.cuda(f)
	n, ret := s.api.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return fmt.Errorf("nvml: count the GPUs: %w", ret)
	}
	for i := range n {
		f.GPUs = append(f.GPUs, s.gpu(i))
	}
	return nil
}

func (s *session) cuda(f *Findings) {
	const old, symbol = "nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2"
	var version int
	asked := false
	if s.has(symbol) {
		asked = s.ask(symbol, func() (ret nvml.Return) {
			version, ret = s.api.SystemGetCudaDriverVersion_v2()
			return
		})
	} else {
		asked = s.ask(old, func() (ret nvml.Return) {
			version, ret = s.api.SystemGetCudaDriverVersion()
			return
		})
	}
	if asked {
		f.CUDA = fmt.Sprintf("%d.%d", version/1000, version%1000/10)
	}
}
