// libnvme.c writes the golden files libnvme-*.hex: structures laid out by the
// C compiler from libnvme's <nvme/types.h>, an implementation that is not ours.
// Each field k of a structure is filled with the bytes 16k+1, 16k+2, 16k+3, ...
// (modulo 256), so that a wrong offset, size or byte order shows. Texts are given.
//
//   apt-get install libnvme-dev
//   cc -o /tmp/libnvme testdata/libnvme.c && cd testdata && /tmp/libnvme
//
// The Go side (TestLibnvmeLayout) fills its structures by the same rule, in the
// same order.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <nvme/types.h>

static FILE *out;
static unsigned char *base;
static int k;

static void open_file(const char *name, const char *what, void *p)
{
	out = fopen(name, "w");
	if (!out) {
		perror(name);
		exit(1);
	}
	fprintf(out, "# Source: %s of libnvme 1.3 <nvme/types.h>, filled by libnvme.c.\n", what);
	base = p;
	k = 0;
}

static void dump(const char *name, void *p, size_t n)
{
	unsigned char *b = p;
	fprintf(out, "@%zu", (size_t)(b - base));
	for (size_t i = 0; i < n; i++)
		fprintf(out, "%s%02x", i && i % 32 == 0 ? "\n\t" : " ", b[i]);
	fprintf(out, "  # %s\n", name);
}

static void fill(const char *name, void *p, size_t n)
{
	unsigned char *b = p;
	for (size_t i = 0; i < n; i++)
		b[i] = k * 16 + i + 1;
	k++;
	dump(name, p, n);
}

static void text(const char *name, char *p, size_t n, char pad, const char *s)
{
	memset(p, pad, n);
	memcpy(p, s, strlen(s));
	k++;
	while (n > 1 && p[n - 1] == 0) // the reader fills with zeros
		n--;
	dump(name, p, n);
}

static void done(size_t size)
{
	fprintf(out, "@%zu\n", size);
	fclose(out);
}

#define F(f) fill(#f, &v.f, sizeof v.f)
#define A(f) fill(#f, v.f, sizeof v.f)
#define SPACES(f, s) text(#f, v.f, sizeof v.f, ' ', s)
#define NULS(f, s) text(#f, v.f, sizeof v.f, 0, s)

static void id_ctrl(void)
{
	static struct nvme_id_ctrl v;
	open_file("libnvme-id-ctrl.hex", "struct nvme_id_ctrl", &v);
	F(vid); F(ssvid);
	SPACES(sn, "SERIAL0123"); SPACES(mn, "rdblk model"); SPACES(fr, "1.2.3");
	F(rab); A(ieee); F(cmic); F(mdts); F(cntlid); F(ver); F(rtd3r); F(rtd3e);
	F(oaes); F(ctratt); F(rrls); F(cntrltype); A(fguid);
	F(crdt1); F(crdt2); F(crdt3);
	F(oacs); F(acl); F(aerl); F(frmw); F(lpa); F(elpe); F(npss); F(avscc); F(apsta);
	F(wctemp); F(cctemp); F(mtfa); A(tnvmcap); A(unvmcap); F(rpmbs); F(edstt);
	F(dsto); F(fwug); F(kas); F(hctma); F(sanicap); F(anatt); F(anacap);
	F(anagrpmax); F(nanagrpid); F(sqes); F(cqes); F(maxcmd); F(nn); F(oncs);
	F(fuses); F(fna); F(vwc); F(awun); F(awupf); F(icsvscc); F(nwpc); F(acwu);
	F(sgls); F(mnan); NULS(subnqn, "nqn.2026-11.io.rdblk:golden");
	F(ioccsz); F(iorcsz); F(icdoff); F(fcatt); F(msdbd); F(ofcs); F(dctype);
	F(psd[0].mp); F(psd[31].mp);
	done(sizeof v);
}

static void id_ns(void)
{
	static struct nvme_id_ns v;
	open_file("libnvme-id-ns.hex", "struct nvme_id_ns", &v);
	F(nsze); F(ncap); F(nuse); F(nsfeat); F(nlbaf); F(flbas); F(mc); F(dpc); F(dps);
	F(nmic); F(rescap); F(fpi); F(dlfeat); F(nawun); F(nawupf); F(nacwu); F(nabsn);
	F(nabo); F(nabspf); F(noiob); A(nvmcap); F(npwg); F(npwa); F(npdg); F(npda);
	F(nows); F(mssrl); F(mcl); F(msrc); F(anagrpid); F(nsattr); F(nvmsetid);
	F(endgid); A(nguid); A(eui64);
	F(lbaf[0].ms); F(lbaf[0].ds); F(lbaf[0].rp);
	F(lbaf[63].ms); F(lbaf[63].ds); F(lbaf[63].rp);
	done(sizeof v);
}

static void others(void)
{
	{
		static struct nvme_id_ctrl_nvm v;
		open_file("libnvme-id-ctrl-nvm.hex", "struct nvme_id_ctrl_nvm", &v);
		F(vsl); F(wzsl); F(wusl); F(dmrl); F(dmrsl); F(dmsl);
		done(sizeof v);
	}
	{
		static struct nvme_id_independent_id_ns v;
		open_file("libnvme-id-independent-ns.hex", "struct nvme_id_independent_id_ns", &v);
		F(nsfeat); F(nmic); F(rescap); F(fpi); F(anagrpid); F(nsattr); F(nvmsetid);
		F(endgid); F(nstat);
		done(sizeof v);
	}
	{
		static struct nvme_smart_log v;
		open_file("libnvme-smart-log.hex", "struct nvme_smart_log", &v);
		F(critical_warning); A(temperature); F(avail_spare); F(spare_thresh);
		F(percent_used); A(data_units_read); A(data_units_written); A(host_reads);
		A(host_writes); A(ctrl_busy_time); A(power_cycles); A(power_on_hours);
		A(unsafe_shutdowns); A(media_errors); A(num_err_log_entries);
		F(warning_temp_time); F(critical_comp_time);
		for (int i = 0; i < 8; i++)
			F(temp_sensor[i]);
		done(sizeof v);
	}
	{
		static struct nvme_error_log_page v;
		open_file("libnvme-error-log.hex", "struct nvme_error_log_page", &v);
		F(error_count); F(sqid); F(cmdid);
		v.status_field = 0x3230; // without the phase bit, which fabrics has not
		k++;
		dump("status_field", &v.status_field, sizeof v.status_field);
		F(parm_error_location);
		F(lba); F(nsid); F(vs); F(trtype); F(cs); F(trtype_spec_info);
		done(sizeof v);
	}
	{
		static struct nvme_firmware_slot v;
		open_file("libnvme-fw-slot.hex", "struct nvme_firmware_slot", &v);
		F(afi);
		SPACES(frs[0], "1.2.3"); SPACES(frs[6], "FWREV007");
		done(sizeof v);
	}
	{
		static struct nvme_cmd_effects_log v;
		open_file("libnvme-effects.hex", "struct nvme_cmd_effects_log", &v);
		F(acs[0]); F(acs[6]); F(acs[255]); F(iocs[0]); F(iocs[2]); F(iocs[255]);
		done(sizeof v);
	}
	{
		static struct nvme_dsm_range v;
		open_file("libnvme-dsm-range.hex", "struct nvme_dsm_range", &v);
		F(cattr); F(nlb); F(slba);
		done(sizeof v);
	}
	{
		static struct nvme_ns_list v;
		open_file("libnvme-ns-list.hex", "struct nvme_ns_list", &v);
		F(ns[0]); F(ns[1]); F(ns[2]);
		done(sizeof v);
	}
	{
		static struct nvmf_connect_data v;
		open_file("libnvme-connect-data.hex", "struct nvmf_connect_data", &v);
		A(hostid); F(cntlid);
		NULS(subsysnqn, "nqn.2026-11.io.rdblk:golden");
		NULS(hostnqn, "nqn.2014-08.org.nvmexpress:uuid:00112233-4455-6677-8899-aabbccddeeff");
		done(sizeof v);
	}
	{
		static struct { struct nvmf_discovery_log h; } v;
		open_file("libnvme-discovery-header.hex", "struct nvmf_discovery_log", &v);
		F(h.genctr); F(h.numrec);
		done(sizeof v);
	}
	{
		static struct nvmf_disc_log_entry v;
		open_file("libnvme-discovery-entry.hex", "struct nvmf_disc_log_entry", &v);
		F(trtype); F(adrfam); F(subtype); F(treq); F(portid); F(cntlid); F(asqsz); F(eflags);
		NULS(trsvcid, "4420");
		NULS(subnqn, "nqn.2026-11.io.rdblk:golden");
		NULS(traddr, "192.0.2.1");
		F(tsas.rdma.qptype); F(tsas.rdma.prtype); F(tsas.rdma.cms); F(tsas.rdma.pkey);
		done(sizeof v);
	}
}

int main(void)
{
	id_ctrl();
	id_ns();
	others();
	return 0;
}
