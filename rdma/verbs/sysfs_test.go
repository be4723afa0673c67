//go:build cgo && linux && !noverbs

package verbs

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

// What sysfs says of a port on InfiniBand, RoCE and iWARP leads to its network interfaces.
func TestNetworkInterfacesOfAPort(t *testing.T) {
	const link, net = "ports/1/link_layer", "device/net/"
	for _, c := range []struct {
		name  string
		files map[string]string
		want  []string
		mac   []byte
	}{
		{"InfiniBand", map[string]string{link: "InfiniBand", "ports/1/gids/0": "fe80:0000:0000:0000:0002:c903:0001:0203",
			net + "ib0/type": "32", net + "ib0/dev_port": "0", net + "ib0.8001/type": "32", net + "ib0.8001/dev_port": "0",
			net + "ib1/type": "32", net + "ib1/dev_port": "1", net + "eth9/type": "1", net + "eth9/dev_port": "0"}, []string{"ib0", "ib0.8001"}, nil},
		{"RoCE", map[string]string{link: "Ethernet", "ports/1/gid_attrs/ndevs/0": "eth4", "ports/1/gid_attrs/ndevs/1": "eth4.7",
			"ports/1/gids/0": "fe80:0000:0000:0000:0002:c903:0001:0203"}, []string{"eth4", "eth4.7"}, nil},
		{"iWARP", map[string]string{link: "Ethernet", "ports/1/gids/0": "0202:0304:0506:0000:0000:0000:0000:0000"}, nil, []byte{2, 2, 3, 4, 5, 6}},
		{"nothing known", map[string]string{}, nil, nil},
	} {
		dir := t.TempDir()
		os.MkdirAll(filepath.Join(dir, "ports/1"), 0o755)
		for f, text := range c.files {
			os.MkdirAll(filepath.Dir(filepath.Join(dir, f)), 0o755)
			if err := os.WriteFile(filepath.Join(dir, f), []byte(text+"\n"), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want := map[string]bool{}
		for _, n := range c.want {
			want[n] = true
		}
		names, mac := netdevsOf(filepath.Join(dir, "ports/1"))
		if !maps.Equal(names, want) || !bytes.Equal(mac, c.mac) {
			t.Errorf("%s: %v, %v", c.name, names, mac)
		}
	}
}
